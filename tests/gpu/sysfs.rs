//! Trees that look like sysfs, as the amdgpu driver and KFD lay them out.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

/// A root with `sys` and `proc`; it starts empty but for a `proc/meminfo`.
pub struct Tree(TempDir);

/// A card. Pairs are total and used bytes.
#[derive(Clone, Copy)]
pub struct Card<'a> {
    pub driver: &'a str,
    pub pci: &'a str,
    /// Device and revision.
    pub ids: (&'a str, &'a str),
    pub vram: (u64, u64),
    pub gtt: Option<(u64, u64)>,
    /// Of the second voltage.
    pub label: Option<&'a str>,
    pub product: Option<&'a str>,
    pub unique_id: Option<&'a str>,
}

pub const CARD: Card = Card {
    driver: "amdgpu",
    pci: "0000:03:00.0",
    ids: ("0x73bf", "0xc0"),
    vram: (16 << 30, 0),
    gtt: None,
    label: None,
    product: None,
    unique_id: None,
};

impl Tree {
    pub fn new() -> Tree {
        let tree = Tree(tempfile::tempdir().unwrap());
        tree.meminfo("MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\nHugePages_Total: 0\n");
        tree
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn write(&self, path: &str, text: &str) {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub fn meminfo(&self, text: &str) {
        self.write("proc/meminfo", text);
    }

    pub fn card(&self, minor: u32, card: &Card) {
        let write = |name: &str, text: &str| {
            self.write(
                &format!("sys/class/drm/renderD{minor}/device/{name}"),
                &format!("{text}\n"),
            );
        };
        write(
            "uevent",
            &format!(
                "DRIVER={}\nPCI_CLASS=38000\nPCI_SLOT_NAME={}",
                card.driver, card.pci
            ),
        );
        write("device", card.ids.0);
        write("revision", card.ids.1);
        write("mem_info_vram_total", &card.vram.0.to_string());
        write("mem_info_vram_used", &card.vram.1.to_string());
        if let Some((total, used)) = card.gtt {
            write("mem_info_gtt_total", &total.to_string());
            write("mem_info_gtt_used", &used.to_string());
        }
        write("hwmon/hwmon3/in0_label", "vddgfx");
        let optional = [
            ("hwmon/hwmon3/in1_label", card.label),
            ("product_name", card.product),
            ("unique_id", card.unique_id),
        ];
        for (name, text) in optional {
            text.inspect(|text| write(name, text));
        }
    }

    /// A node of KFD with one memory bank; without a render node it is a processor.
    pub fn node(&self, number: u32, minor: Option<u32>, simd_count: u32, bytes: u64) {
        let dir = format!("sys/class/kfd/kfd/topology/nodes/{number}");
        let heap = if minor.is_some() { 1 } else { 0 };
        self.write(
            &format!("{dir}/properties"),
            &format!(
                "cpu_cores_count 0\nsimd_count {simd_count}\ndrm_render_minor {}\n",
                minor.unwrap_or(0)
            ),
        );
        self.write(
            &format!("{dir}/mem_banks/0/properties"),
            &format!("heap_type {heap}\nsize_in_bytes {bytes}\nflags 0\n"),
        );
    }

    /// What `ggufuse gpus --json` says about it, where CUDA has nothing.
    pub fn gpus(&self, variables: &[(&str, &str)]) -> Value {
        let args = ["gpus", "--json", "--root", self.path().to_str().unwrap()];
        let mut variables = variables.to_vec();
        variables.push(("STANDIN_DEVICES", "0"));
        super::json(&super::ggufuse(&args, &variables).output().unwrap())
    }
}
