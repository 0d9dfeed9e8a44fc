//! AMD devices, read from sysfs: no library of AMD's is needed, and no card that sleeps is woken.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::host::Meminfo;
use super::visible::listed;
use super::{Backend, Device, Environment};

/// All devices that ROCm sees, in its order, and what is to be said about the others.
pub(super) fn probe(root: &Path, environment: &Environment) -> (Vec<Device>, Vec<String>) {
    let mut cards = cards(root);
    if cards.is_empty() {
        let none = "no amdgpu device in /sys/class/drm".to_owned();
        return (Vec::new(), vec![none]);
    }
    let mut reasons = Vec::new();
    let nodes = nodes(root);
    match &nodes {
        // ROCm numbers its agents as the kernel numbers KFD's nodes.
        Some(nodes) => {
            let lacks = |card: &&Card| !nodes.contains_key(&card.minor);
            reasons.extend(
                cards.iter().filter(lacks).map(|card| {
                    format!("{}: KFD has no node for it, ROCm cannot use it", card.pci)
                }),
            );
            cards.retain(|card| nodes.contains_key(&card.minor));
            cards.sort_by_key(|card| nodes.get(&card.minor).map(|node| node.number));
        }
        None => {
            reasons.push("no /sys/class/kfd: order by PCI address, not ROCm's".to_owned());
            cards.sort_by(|a, b| a.pci.cmp(&b.pci));
        }
    }
    for (name, list) in lists(environment) {
        let before = cards.len();
        cards = listed(cards, list, |card| {
            Some(format!("GPU-{}", card.text("unique_id")?))
        });
        if cards.len() < before {
            let hidden = before - cards.len();
            reasons.push(format!("{name}={list} hides {hidden} of {before} devices"));
        }
    }
    let bank = |card: &Card| nodes.as_ref()?.get(&card.minor)?.bytes;
    let devices = cards.iter().map(|card| card.device(root, bank(card)));
    (devices.collect(), reasons)
}

/// The lists that choose devices. ROCm's own comes first, then HIP's, for which CUDA's name stands in; an empty one of these
/// two is none.
fn lists(environment: &Environment) -> Vec<(&'static str, &str)> {
    let full = |list: &'_ Option<String>| list.as_deref().is_some_and(|list| !list.is_empty());
    let (hip, cuda) = (
        &environment.hip_visible_devices,
        &environment.cuda_visible_devices,
    );
    let rocr = environment.rocr_visible_devices.as_deref();
    let rocr = rocr.map(|list| ("ROCR_VISIBLE_DEVICES", list));
    let hip = match (full(hip), full(cuda)) {
        (true, _) => hip.as_deref().map(|list| ("HIP_VISIBLE_DEVICES", list)),
        (false, true) => cuda.as_deref().map(|list| ("CUDA_VISIBLE_DEVICES", list)),
        (false, false) => None,
    };
    rocr.into_iter().chain(hip).collect()
}

/// A device that the driver amdgpu has bound.
struct Card {
    /// N of `renderDN`, by which KFD names it too.
    minor: u32,
    pci: String,
    dir: PathBuf,
}

fn cards(root: &Path) -> Vec<Card> {
    let entries = fs::read_dir(root.join("sys/class/drm"));
    let entries = entries.into_iter().flatten().flatten();
    let card = |entry: fs::DirEntry| {
        let minor = entry
            .file_name()
            .to_str()?
            .strip_prefix("renderD")?
            .parse()
            .ok()?;
        let dir = entry.path().join("device");
        let uevent = fs::read_to_string(dir.join("uevent")).ok()?;
        let value = |key| uevent.lines().find_map(|line| line.strip_prefix(key));
        let pci = value("PCI_SLOT_NAME=").unwrap_or("unknown").to_owned();
        (value("DRIVER=")? == "amdgpu").then_some(Card { minor, pci, dir })
    };
    entries.filter_map(card).collect()
}

impl Card {
    fn text(&self, name: &str) -> Option<String> {
        let text = fs::read_to_string(self.dir.join(name)).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    fn bytes(&self, name: &str) -> Result<u64, String> {
        let text = self.text(name).unwrap_or_default();
        text.parse().map_err(|_| format!("{name} cannot be read"))
    }

    /// Free and total bytes of the card's own memory (`vram`) or of host memory it maps (`gtt`).
    fn pool(&self, name: &str) -> Result<(u64, u64), String> {
        let total = self.bytes(&format!("mem_info_{name}_total"))?;
        let used = self.bytes(&format!("mem_info_{name}_used"))?;
        Ok((total.saturating_sub(used), total))
    }

    /// Whether it is part of a processor. The voltage of the north bridge is shown by those only (amdgpu_pm.c,
    /// `hwmon_attributes_visible`).
    fn integrated(&self) -> bool {
        let hwmon = fs::read_dir(self.dir.join("hwmon"));
        let label = |entry: fs::DirEntry| fs::read_to_string(entry.path().join("in1_label")).ok();
        let mut labels = hwmon.into_iter().flatten().flatten().filter_map(label);
        labels.any(|label| label.trim() == "vddnb")
    }

    /// `bank`: the bytes of memory that KFD gives it.
    fn device(&self, root: &Path, bank: Option<u64>) -> Device {
        let integrated = self.integrated();
        let vram = self.pool("vram");
        let shared = Some(self.pool("gtt"))
            .filter(|_| integrated)
            .and_then(Result::ok);
        // ROCm puts the memory of a processor's GPU where there is more: in what the firmware has set apart for it, or in
        // host memory (amdgpu's `apu_prefer_gtt`). What KFD says decides: older kernels have only the former.
        let unified = match (&vram, shared) {
            (Ok((_, vram)), Some((_, gtt))) => bank.unwrap_or((*vram).max(gtt)) > *vram,
            _ => false,
        };
        let memory = match shared.filter(|_| unified) {
            Some((_, gtt_total)) => {
                let total = bank.unwrap_or(gtt_total);
                self.bytes("mem_info_gtt_used").map(|used| {
                    let available = Meminfo::read(root).ok().and_then(|m| m.unified_free());
                    let free = total.saturating_sub(used);
                    (
                        available.map_or(free, |available| free.min(available)),
                        total,
                    )
                })
            }
            None => vram,
        };
        let (free, total) = memory.clone().unwrap_or((0, 0));
        let pool = if unified { "gtt" } else { "vram" };
        Device {
            name: String::new(),
            description: self.description(root),
            backend: Backend::Rocm,
            pci: Some(self.pci.clone()),
            total,
            free,
            integrated,
            unified,
            found: format!("sysfs, renderD{}, mem_info_{pool}", self.minor),
            problem: memory.err(),
        }
    }

    /// What the board says, else what libdrm's list says, else the numbers.
    fn description(&self, root: &Path) -> String {
        if let Some(name) = self.text("product_name") {
            return name;
        }
        let hex = |name| {
            let text = self.text(name)?;
            u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
        };
        let (device, revision) = (hex("device"), hex("revision"));
        let ids = fs::read_to_string(root.join("usr/share/libdrm/amdgpu.ids"));
        let known = |line: &str| {
            let mut fields = line.splitn(3, ',').map(str::trim);
            let number = |text: Option<&str>| u32::from_str_radix(text?, 16).ok();
            let mine = number(fields.next())? == device? && number(fields.next())? == revision?;
            Some(fields.next()?.to_owned()).filter(|_| mine)
        };
        let listed = ids.ok().and_then(|ids| ids.lines().find_map(known));
        listed.unwrap_or_else(|| match device {
            Some(device) => format!("AMD GPU 1002:{device:04x}"),
            None => "AMD GPU".to_owned(),
        })
    }
}

/// A node of KFD, the kernel's side of ROCm.
struct Node {
    number: u32,
    /// Of its memory banks.
    bytes: Option<u64>,
}

/// KFD's GPU nodes by the minor number of their render node; none if there is no KFD.
fn nodes(root: &Path) -> Option<BTreeMap<u32, Node>> {
    let entries = fs::read_dir(root.join("sys/class/kfd/kfd/topology/nodes")).ok()?;
    let node = |entry: fs::DirEntry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        let dir = entry.path();
        let properties = fs::read_to_string(dir.join("properties")).ok()?;
        let minor = u32::try_from(property(&properties, "drm_render_minor")?).ok()?;
        let gpu = property(&properties, "simd_count")? > 0;
        let banks = fs::read_dir(dir.join("mem_banks"));
        let bank = |entry: fs::DirEntry| {
            let text = fs::read_to_string(entry.path().join("properties")).ok()?;
            // Heaps 1 and 2 are the frame buffer, the part that the processor sees and the rest.
            let heap = property(&text, "heap_type")?;
            property(&text, "size_in_bytes").filter(|_| heap == 1 || heap == 2)
        };
        let banks = banks.into_iter().flatten().flatten().filter_map(bank);
        let bytes = banks.reduce(u64::saturating_add);
        gpu.then_some((minor, Node { number, bytes }))
    };
    Some(entries.flatten().filter_map(node).collect())
}

/// A line `KEY NUMBER`.
fn property(text: &str, key: &str) -> Option<u64> {
    let value = |line: &str| line.strip_prefix(key)?.strip_prefix(' ')?.parse().ok();
    text.lines().find_map(value)
}
