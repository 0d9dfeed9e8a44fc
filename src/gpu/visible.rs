//! Which devices the environment lets llama.cpp see.

use super::Device;

/// `GGML_CUDA_MAX_DEVICES` (ggml-cuda.h).
pub(super) const MAX_DEVICES: usize = 16;

/// Those of `items` that a list such as `2,0` or `GPU-1f2e,0` names, in its order: by index, or by what `id` gives. As ROCm
/// reads it, the list ends at the first entry that names nothing, or an item again.
pub(super) fn listed<T>(items: Vec<T>, list: &str, id: impl Fn(&T) -> Option<String>) -> Vec<T> {
    let mut items: Vec<Option<T>> = items.into_iter().map(Some).collect();
    let mut chosen = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let named = |item: &Option<T>| {
            let own = item.as_ref().and_then(&id);
            own.is_some_and(|own| own.eq_ignore_ascii_case(entry))
        };
        let at = entry.parse().ok().or_else(|| items.iter().position(named));
        match at.and_then(|at: usize| items.get_mut(at)?.take()) {
            Some(item) => chosen.push(item),
            None => break,
        }
    }
    chosen
}

/// The devices as llama.cpp lists them, and what is to be said about it (ggml-cuda.cu, `ggml_cuda_init` and
/// `ggml_backend_cuda_device_get_memory`): with `GGML_CUDA_DEVICES` as many as it says, spread over those that are there,
/// which share their memory evenly.
pub(super) fn emulated(
    physical: Vec<Device>,
    requested: Option<&str>,
) -> (Vec<Device>, Vec<String>) {
    let mut reasons = Vec::new();
    let requested = requested.filter(|_| !physical.is_empty()).and_then(|text| {
        let count = leading_number(text);
        if count.is_none() {
            reasons.push(format!("GGML_CUDA_DEVICES={text} is no number of devices"));
        }
        count
    });
    let wanted = requested.unwrap_or(physical.len());
    let count = wanted.min(MAX_DEVICES);
    if count < wanted {
        reasons.push(format!(
            "there are more than the {MAX_DEVICES} devices that llama.cpp takes"
        ));
    }
    let backing = || (0..count).zip(physical.iter().enumerate().cycle());
    let device = |(i, (at, device)): (usize, (usize, &Device))| {
        let shares = backing().filter(|(_, (other, _))| *other == at).count() as u64;
        Device {
            name: format!("{}{i}", device.backend.name()),
            total: device.total.checked_div(shares).unwrap_or(0),
            free: device.free.checked_div(shares).unwrap_or(0),
            ..device.clone()
        }
    };
    (backing().map(device).collect(), reasons)
}

/// As atoi(3) reads it; only a positive number counts.
fn leading_number(text: &str) -> Option<usize> {
    let text = text.trim_start();
    let text = text.strip_prefix('+').unwrap_or(text);
    let end = text.bytes().take_while(u8::is_ascii_digit).count();
    text.get(..end)?.parse().ok().filter(|&n| n > 0)
}

#[cfg(test)]
mod tests {
    use super::super::Backend;
    use super::*;

    fn devices(frees: &[u64]) -> Vec<Device> {
        let device = |&free: &u64| Device {
            name: String::new(),
            description: "d".to_owned(),
            backend: Backend::Cuda,
            pci: None,
            total: 1000,
            free,
            integrated: false,
            unified: false,
            found: String::new(),
            problem: None,
        };
        frees.iter().map(device).collect()
    }

    fn shown(devices: &[Device]) -> Vec<(&str, u64, u64)> {
        let rows = devices.iter();
        rows.map(|d| (d.name.as_str(), d.total, d.free)).collect()
    }

    #[test]
    fn lists_choose_and_order_until_an_entry_names_nothing() {
        let id = |c: &char| (*c == 'b').then(|| "GPU-B".to_owned());
        let chosen = |list| listed(vec!['a', 'b', 'c'], list, id);
        assert_eq!(chosen("2,0"), ['c', 'a']);
        assert_eq!(chosen(" 1 , 2"), ['b', 'c']);
        assert_eq!(chosen("gpu-b,0"), ['b', 'a']);
        assert_eq!(chosen("0,7,1"), ['a']);
        assert_eq!(chosen("0,0,1"), ['a']);
        assert_eq!(chosen("-1"), []);
        assert_eq!(chosen(""), []);
    }

    #[test]
    fn devices_are_numbered() {
        let (found, reasons) = emulated(devices(&[7, 8]), None);
        assert_eq!(shown(&found), [("CUDA0", 1000, 7), ("CUDA1", 1000, 8)]);
        assert!(reasons.is_empty());
    }

    #[test]
    fn emulated_devices_share_memory() {
        let (found, _) = emulated(devices(&[900, 600]), Some("3"));
        assert_eq!(
            shown(&found),
            [
                ("CUDA0", 500, 450),
                ("CUDA1", 1000, 600),
                ("CUDA2", 500, 450)
            ]
        );
        let (found, _) = emulated(devices(&[900, 600]), Some("1"));
        assert_eq!(shown(&found), [("CUDA0", 1000, 900)]);
        let (found, reasons) = emulated(devices(&[900]), Some("none"));
        assert_eq!((found.len(), reasons.len()), (1, 1));
        let (found, reasons) = emulated(devices(&[]), Some("4"));
        assert_eq!((found.len(), reasons.len()), (0, 0));
    }

    #[test]
    fn there_are_sixteen_devices_at_most() {
        let (found, reasons) = emulated(devices(&[1; 20]), None);
        assert_eq!((found.len(), reasons.len()), (16, 1));
        let (found, reasons) = emulated(devices(&[1; 2]), Some("99999999"));
        assert_eq!((found.len(), reasons.len()), (16, 1));
    }
}
