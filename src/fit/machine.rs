/// Where a tensor or a node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// A device, by its number.
    Device(usize),
    /// Host memory, whatever its buffer type.
    Host,
}

/// A device to plan for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Name of its buffer type: `CUDA0`.
    pub name: String,
    /// Bytes free.
    pub free: u64,
    /// Bytes in all.
    pub total: u64,
}

/// Host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostMemory {
    /// Bytes available.
    pub free: u64,
    /// Bytes in all.
    pub total: u64,
}

/// The machine to plan for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Machine {
    /// Devices in llama.cpp's order.
    pub devices: Vec<Device>,
    /// Host memory; `None` where it is not known.
    pub host: Option<HostMemory>,
}

impl Machine {
    /// The place of a buffer type's name: `CPU` or a device.
    pub fn place(&self, buffer: &str) -> Option<Place> {
        if buffer == "CPU" {
            return Some(Place::Host);
        }
        let device = self.devices.iter().position(|d| d.name == buffer)?;
        Some(Place::Device(device))
    }

    /// The name of a place's buffer type.
    pub fn buffer(&self, place: Place) -> &str {
        match place {
            Place::Host => "CPU",
            Place::Device(d) => self.devices.get(d).map_or("CPU", |device| &device.name),
        }
    }
}
