//! CUDA devices, asked through the driver. Only the child of a probe comes here: the driver is loaded into the process.

use std::ffi::{CStr, c_int};
use std::panic;
use std::path::Path;

use cudarc::driver::result::{self, DriverError, device, primary_ctx};
use cudarc::driver::sys;

use super::host::Meminfo;
use super::visible::MAX_DEVICES;
use super::{Backend, Device, Environment};

/// All devices that the driver shows, in its order, or why there are none.
pub(super) fn probe(root: &Path, environment: &Environment) -> (Vec<Device>, Vec<String>) {
    // cudarc panics where the driver lacks a symbol: that is a reason as well.
    panic::set_hook(Box::new(|_| ()));
    let asked = panic::catch_unwind(|| ask(root, environment));
    drop(panic::take_hook());
    let asked = asked.unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().cloned();
        Err(text.unwrap_or_else(|| "the driver cannot be used".to_owned()))
    });
    match asked {
        Ok(devices) => (devices, Vec::new()),
        Err(why) => (Vec::new(), vec![why]),
    }
}

fn ask(root: &Path, environment: &Environment) -> Result<Vec<Device>, String> {
    // SAFETY: this loads libcuda and runs its initialisers, which this process is for.
    if !unsafe { sys::is_culib_present() } {
        return Err("libcuda cannot be loaded: there is no NVIDIA driver".to_owned());
    }
    let hint = match &environment.cuda_visible_devices {
        Some(list) => format!(" (CUDA_VISIBLE_DEVICES={list})"),
        None => String::new(),
    };
    let failed = |call| move |e: DriverError| said(call, &e);
    result::init().map_err(|e| said("cuInit", &e) + &hint)?;
    let count = device::get_count().map_err(failed("cuDeviceGetCount"))?;
    if count <= 0 {
        return Err(format!("the driver shows no device{hint}"));
    }
    let version = version();
    // A driver that is out of its mind must not keep us counting; `emulated` says that there were more.
    let most = c_int::try_from(MAX_DEVICES + 1).unwrap_or(c_int::MAX);
    // llama.cpp has a context on every device when it asks the first one for its free memory.
    let opened: Vec<Opened> = (0..count.min(most)).map(Opened::new).collect();
    let unified = || Meminfo::read(root).ok()?.unified_free();
    let device = |opened: &Opened| {
        let memory = opened.memory();
        let is_unified = opened.integrated || environment.unified_memory;
        let (free, total) = match memory {
            Ok((free, total)) => (unified().filter(|_| is_unified).unwrap_or(free), total),
            Err(_) => (0, 0),
        };
        Device {
            name: String::new(),
            description: opened.name.clone(),
            backend: Backend::Cuda,
            pci: opened.pci.clone(),
            total,
            free,
            integrated: opened.integrated,
            unified: is_unified,
            found: format!("CUDA driver{version}, memory with a context"),
            problem: memory.err(),
        }
    };
    Ok(opened.iter().map(device).collect())
}

/// A device with its primary context, the one llama.cpp uses, until it is dropped.
struct Opened {
    name: String,
    pci: Option<String>,
    integrated: bool,
    context: Result<(sys::CUdevice, sys::CUcontext), String>,
}

impl Opened {
    fn new(ordinal: c_int) -> Opened {
        let device = match device::get(ordinal) {
            Ok(device) => device,
            Err(e) => {
                return Opened {
                    name: "unknown".to_owned(),
                    pci: None,
                    integrated: false,
                    context: Err(said("cuDeviceGet", &e)),
                };
            }
        };
        let integrated = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED;
        // SAFETY: `device` comes from cuDeviceGet.
        let (integrated, context) = unsafe {
            (
                device::get_attribute(device, integrated),
                primary_ctx::retain(device),
            )
        };
        Opened {
            name: device::get_name(device).unwrap_or_else(|_| "unknown".to_owned()),
            pci: pci(device),
            integrated: integrated.is_ok_and(|n| n > 0),
            context: context
                .map(|context| (device, context))
                .map_err(|e| said("cuDevicePrimaryCtxRetain", &e)),
        }
    }

    /// Free and total bytes.
    fn memory(&self) -> Result<(u64, u64), String> {
        let (_, context) = self.context.as_ref().map_err(String::clone)?;
        // SAFETY: the context is retained until `self` is dropped.
        unsafe { result::ctx::set_current(*context) }.map_err(|e| said("cuCtxSetCurrent", &e))?;
        let (free, total) = result::mem_get_info().map_err(|e| said("cuMemGetInfo", &e))?;
        if free > total {
            return Err(format!("cuMemGetInfo: {free} bytes free of {total}"));
        }
        Ok((free as u64, total as u64))
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Ok((device, _)) = self.context {
            // SAFETY: the context of this device was retained once and is not used any more. Should it not be released,
            // the end of the process does it.
            let _: Result<(), DriverError> = unsafe { primary_ctx::release(device) };
        }
    }
}

/// `0000:c1:00.0`.
fn pci(device: sys::CUdevice) -> Option<String> {
    let mut text = [0u8; 32];
    // SAFETY: the buffer is as long as the call is told (one less, so that it ends in NUL), and `device` comes from
    // cuDeviceGet.
    let done = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), 31, device) };
    done.result().ok()?;
    let text = CStr::from_bytes_until_nul(&text).ok()?;
    Some(text.to_str().ok()?.to_ascii_lowercase())
}

/// ` 12.8`, if the driver says so.
fn version() -> String {
    let mut version = 0;
    // SAFETY: the pointer is to a local integer.
    let done = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    match done.result() {
        Ok(()) => format!(" {}.{}", version / 1000, version % 1000 / 10),
        Err(_) => String::new(),
    }
}

/// A failed call, in the driver's words. The number is not looked up in cudarc's table: a newer driver has more of them.
fn said(call: &str, error: &DriverError) -> String {
    let name = error.error_name().map(CStr::to_string_lossy);
    let text = error.error_string().map(CStr::to_string_lossy);
    match (name, text) {
        (Ok(name), Ok(text)) => format!("{call}: {name}, {text}"),
        _ => format!("{call}: error {}", error.0 as u32),
    }
}
