use super::{DEVICE_ALIGNMENT, HOST_ALIGNMENT, Place, Placement};
use crate::arch::{Model, Role, Tensor, row_size};
use crate::gguf::GgmlType;
use crate::units::align_up;

/// Rows of quantized tensors are padded to this many values on a device, for the matrix kernels (`MATRIX_ROW_PADDING`).
const ROW_PADDING: u64 = 512;

/// Bytes that a tensor of this type and shape takes in a buffer, before alignment: devices pad the last row.
pub fn buffer_bytes(ty: GgmlType, ne: [u64; 4], place: Place) -> u64 {
    let rows = ne.iter().skip(1).fold(1, |n: u64, &e| n.saturating_mul(e));
    let [width, ..] = ne;
    let bytes = row_size(ty, width).saturating_mul(rows);
    let quantized = ty.block().is_some_and(|(values, _)| values > 1);
    match place {
        Place::Device(_) if quantized && width % ROW_PADDING != 0 => {
            bytes.saturating_add(row_size(ty, ROW_PADDING - width % ROW_PADDING))
        }
        _ => bytes,
    }
}

/// The same with the alignment of the place's buffers: what the tensor adds to a buffer.
pub fn allocated_bytes(ty: GgmlType, ne: [u64; 4], place: Place) -> u64 {
    let alignment = match place {
        Place::Device(_) => DEVICE_ALIGNMENT,
        Place::Host => HOST_ALIGNMENT,
    };
    align_up(buffer_bytes(ty, ne, place), alignment).unwrap_or(u64::MAX)
}

/// Adds bytes per place.
#[derive(Debug)]
pub(super) struct Sums {
    pub devices: Vec<u64>,
    pub host: u64,
}

impl Sums {
    pub fn new(n_devices: usize) -> Sums {
        Sums {
            devices: vec![0; n_devices],
            host: 0,
        }
    }

    pub fn add(&mut self, place: Place, bytes: u64) {
        let sum = match place {
            Place::Host => Some(&mut self.host),
            Place::Device(d) => self.devices.get_mut(d),
        };
        if let Some(sum) = sum {
            *sum = sum.saturating_add(bytes);
        }
    }
}

/// Bytes of the weights per device, and on the host.
pub fn weight_bytes(model: &Model, placement: &Placement) -> (Vec<u64>, u64) {
    let mut sums = Sums::new(placement.n_devices());
    let mut put = |t: &Tensor, place| sums.add(place, allocated_bytes(t.ty, t.ne, place));
    for (i, t) in model.tensors().iter().enumerate() {
        if t.role == Role::Rope {
            for place in rope_places(model, placement, i) {
                put(t, place);
            }
        } else if let Some(place) = placement.tensor(i) {
            put(t, place);
        }
    }
    if let Some((i, t)) = tied(model) {
        let place = placement.redirect(i, placement.output());
        // Made for the output first, the table is made again; made for the input first, the output finds it there.
        let output_first = matches!(model.hparams.arch(), "gemma3n" | "gemma4");
        if output_first || Some(place) != placement.tensor(i) {
            put(t, place);
        }
    }
    (sums.devices, sums.host)
}

fn tied(model: &Model) -> Option<(usize, &Tensor)> {
    let i = model.tied_output()?;
    Some((i, model.tensors().get(i)?))
}

/// Every place with a layer that uses the RoPE factors has them once.
fn rope_places(model: &Model, placement: &Placement, index: usize) -> Vec<Place> {
    let layers = (0..model.hparams.n_layer()).filter(|&il| model.uses_rope_factors(il));
    let mut places: Vec<Place> = layers
        .map(|il| placement.redirect(index, placement.layer(il)))
        .collect();
    places.sort_unstable();
    places.dedup();
    places
}
