//! Sysfs trees and what is made of them.

use ggufuse::gpu::Device;

use crate::sysfs;
use crate::{GIB, MIB, column, ggufuse, json, reason};

#[test]
fn amd_cards_are_listed_in_the_order_of_kfd() {
    let root = sysfs::Tree::new();
    root.card(
        128,
        &sysfs::Card {
            pci: "0000:03:00.0",
            vram: (24 * GIB, GIB),
            unique_id: Some("aa11"),
            ..sysfs::CARD
        },
    );
    root.card(
        129,
        &sysfs::Card {
            pci: "0000:83:00.0",
            vram: (16 * GIB, 2 * GIB),
            unique_id: Some("bb22"),
            ..sysfs::CARD
        },
    );
    root.card(
        130,
        &sysfs::Card {
            pci: "0000:a3:00.0",
            driver: "nvidia",
            ..sysfs::CARD
        },
    );
    root.node(0, None, 0, 0);
    root.node(1, Some(129), 64, 16 * GIB);
    root.node(2, Some(128), 96, 24 * GIB);
    let found = root.gpus(&[]);
    assert_eq!(column(&found, "name"), ["ROCm0", "ROCm1"]);
    assert_eq!(column(&found, "pci"), ["0000:83:00.0", "0000:03:00.0"]);
    assert_eq!(column(&found, "total"), [16 * GIB, 24 * GIB]);
    assert_eq!(column(&found, "free"), [14 * GIB, 23 * GIB]);
    assert_eq!(column(&found, "integrated"), [false; 2]);
    assert_eq!(column(&found, "used"), [true; 2]);
    let chosen = |variables: &[(&str, &str)]| {
        let found = root.gpus(variables);
        column(&found, "pci")
            .iter()
            .map(|pci| pci.as_str().unwrap()[5..7].to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(chosen(&[("HIP_VISIBLE_DEVICES", "1")]), ["03"]);
    assert_eq!(
        chosen(&[("HIP_VISIBLE_DEVICES", "1"), ("CUDA_VISIBLE_DEVICES", "0")]),
        ["03"]
    );
    assert_eq!(chosen(&[("CUDA_VISIBLE_DEVICES", "1,0")]), ["03", "83"]);
    assert_eq!(
        chosen(&[("ROCR_VISIBLE_DEVICES", "GPU-aa11,0")]),
        ["03", "83"]
    );
    // HIP counts what ROCm's own list has left.
    assert_eq!(
        chosen(&[("ROCR_VISIBLE_DEVICES", "1"), ("HIP_VISIBLE_DEVICES", "0")]),
        ["03"]
    );
    assert!(chosen(&[("ROCR_VISIBLE_DEVICES", "")]).is_empty());
}

#[test]
fn amd_cards_without_kfd_come_by_address_and_say_so() {
    let root = sysfs::Tree::new();
    root.card(
        128,
        &sysfs::Card {
            pci: "0000:83:00.0",
            ..sysfs::CARD
        },
    );
    root.card(
        129,
        &sysfs::Card {
            pci: "0000:03:00.0",
            ..sysfs::CARD
        },
    );
    let found = root.gpus(&[]);
    assert_eq!(column(&found, "pci"), ["0000:03:00.0", "0000:83:00.0"]);
    assert!(reason(&found, "ROCm").contains("kfd"));
    // One that KFD does not know cannot be used.
    root.node(1, Some(128), 64, 16 * GIB);
    let found = root.gpus(&[]);
    assert_eq!(column(&found, "pci"), ["0000:83:00.0"]);
    assert!(reason(&found, "ROCm").starts_with("0000:03:00.0"));
}

#[test]
fn amd_processors_have_host_memory_where_there_is_more_of_it() {
    let apu = sysfs::Card {
        pci: "0000:c5:00.0",
        vram: (512 * MIB, 100 * MIB),
        gtt: Some((30 * GIB, GIB)),
        label: Some("vddnb"),
        ..sysfs::CARD
    };
    let figures = |card: &sysfs::Card, node: Option<u64>, available: u64| {
        let root = sysfs::Tree::new();
        root.meminfo(&format!("MemAvailable: {} kB\n", available / 1024));
        root.card(128, card);
        if let Some(bytes) = node {
            root.node(1, Some(128), 12, bytes);
        }
        let found = root.gpus(&[]);
        let device: Device = serde_json::from_value(found["devices"][0].clone()).unwrap();
        (device.integrated, device.unified, device.total, device.free)
    };
    assert_eq!(
        figures(&apu, None, 50 * GIB),
        (true, true, 30 * GIB, 29 * GIB)
    );
    assert_eq!(
        figures(&apu, None, 10 * GIB),
        (true, true, 30 * GIB, 10 * GIB)
    );
    // An older kernel: KFD gives it what the firmware has set apart only.
    assert_eq!(
        figures(&apu, Some(512 * MIB), 50 * GIB),
        (true, false, 512 * MIB, 412 * MIB)
    );
    assert_eq!(
        figures(&apu, Some(28 * GIB), 50 * GIB),
        (true, true, 28 * GIB, 27 * GIB)
    );
    let large = sysfs::Card {
        vram: (96 * GIB, GIB),
        ..apu
    };
    assert_eq!(
        figures(&large, None, 10 * GIB),
        (true, false, 96 * GIB, 95 * GIB)
    );
    // A card can map host memory too, but that is not where models go.
    let card = sysfs::Card { label: None, ..apu };
    assert_eq!(
        figures(&card, None, 50 * GIB),
        (false, false, 512 * MIB, 412 * MIB)
    );
}

#[test]
fn amd_processors_are_not_used_beside_a_card() {
    let root = sysfs::Tree::new();
    root.card(
        128,
        &sysfs::Card {
            label: Some("vddnb"),
            pci: "0000:01:00.0",
            ..sysfs::CARD
        },
    );
    assert_eq!(column(&root.gpus(&[]), "used"), [true]);
    root.card(
        129,
        &sysfs::Card {
            pci: "0000:03:00.0",
            ..sysfs::CARD
        },
    );
    assert_eq!(column(&root.gpus(&[]), "used"), [false, true]);
    // A CUDA device counts as well.
    let args = ["gpus", "--json", "--root", root.path().to_str().unwrap()];
    let found = json(&ggufuse(&args, &[]).output().unwrap());
    assert_eq!(column(&found, "name"), ["CUDA0", "ROCm0", "ROCm1"]);
    assert_eq!(column(&found, "used"), [true, false, false]);
}

#[test]
fn amd_names_come_from_the_board_or_from_libdrm() {
    let root = sysfs::Tree::new();
    root.write(
        "usr/share/libdrm/amdgpu.ids",
        "# list\n1.0.0\n744C,\tC4,\tAnother\n744C,\tC8,\tAMD Radeon RX 7900 XTX\n",
    );
    root.card(
        128,
        &sysfs::Card {
            pci: "0000:01:00.0",
            ids: ("0x744c", "0xc8"),
            ..sysfs::CARD
        },
    );
    root.card(
        129,
        &sysfs::Card {
            pci: "0000:02:00.0",
            product: Some("AMD Instinct MI210"),
            ..sysfs::CARD
        },
    );
    root.card(
        130,
        &sysfs::Card {
            pci: "0000:03:00.0",
            ids: ("0x1234", "0x00"),
            ..sysfs::CARD
        },
    );
    assert_eq!(
        column(&root.gpus(&[]), "description"),
        [
            "AMD Radeon RX 7900 XTX",
            "AMD Instinct MI210",
            "AMD GPU 1002:1234"
        ]
    );
}

#[test]
fn amd_figures_that_cannot_be_read_are_a_problem_of_the_device() {
    let root = sysfs::Tree::new();
    root.card(128, &sysfs::CARD);
    for (text, problem) in [
        ("", "mem_info_vram_total cannot be read"),
        ("-1", "mem_info_vram_total cannot be read"),
        ("99999999999999999999", "mem_info_vram_total cannot be read"),
    ] {
        root.write("sys/class/drm/renderD128/device/mem_info_vram_total", text);
        let found = root.gpus(&[]);
        assert_eq!(column(&found, "total"), [0], "{text}");
        assert_eq!(column(&found, "problem"), [problem], "{text}");
    }
}
