//! Helpers of the integration tests: the peers, the command, mounts that always go away.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(dead_code, reason = "each test binary uses its part")]

pub mod disk;
pub mod trace;

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// The folder of the peers, built by tests/peers.sh when missing.
pub fn peers() -> PathBuf {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers.sh");
    let out = Command::new(script)
        .output()
        .expect("tests/peers.sh starts");
    assert!(
        out.status.success(),
        "tests/peers.sh failed:\n{}",
        String::from_utf8_lossy(&out.stderr)
    );
    String::from_utf8(out.stdout)
        .unwrap()
        .lines()
        .last()
        .expect("a folder")
        .into()
}

pub fn ggufuse(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ggufuse"))
        .args(args)
        .output()
        .expect("ggufuse starts")
}

pub fn is_root() -> bool {
    std::fs::metadata("/proc/self")
        .is_ok_and(|meta| std::os::unix::fs::MetadataExt::uid(&meta) == 0)
}

/// A mounted model; dropping it unmounts.
pub struct Mounted {
    pub dir: tempfile::TempDir,
}

impl Mounted {
    pub fn new(source: &Path, options: &[&str]) -> Mounted {
        Mounted::with(tempfile::tempdir().unwrap(), source, options)
    }

    /// On a mount point that is there already.
    pub fn at(dir: tempfile::TempDir, source: &Path) -> Mounted {
        Mounted::with(dir, source, &[])
    }

    fn with(dir: tempfile::TempDir, source: &Path, options: &[&str]) -> Mounted {
        assert!(
            Path::new("/dev/fuse").exists(),
            "these tests need /dev/fuse"
        );
        let mut args = vec![
            "mount",
            source.to_str().unwrap(),
            dir.path().to_str().unwrap(),
        ];
        args.extend(options);
        let out = ggufuse(&args);
        assert!(
            out.status.success(),
            "mount failed: {}",
            String::from_utf8_lossy(&out.stderr)
        );
        Mounted { dir }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The names of the files in the mount, without those of the fit.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(self.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .filter(|name| !name.starts_with("fit-"))
            .collect();
        names.sort();
        names
    }

    /// Unmounts and waits until the directory is an ordinary one again. Tests run in threads of one process: a command
    /// that another thread starts has, until its exec, our descriptors too, those closed since among them. That is over
    /// in a moment; a file that is really left open still fails here.
    pub fn unmount(self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        let out = loop {
            let out = ggufuse(&["unmount", self.path().to_str().unwrap()]);
            let busy = String::from_utf8_lossy(&out.stderr).contains("os error 16");
            if !busy || Instant::now() > deadline {
                break out;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        assert!(
            out.status.success(),
            "unmount failed: {}",
            String::from_utf8_lossy(&out.stderr)
        );
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        drop(ggufuse(&[
            "unmount",
            "--lazy",
            self.path().to_str().unwrap(),
        ]));
    }
}

/// Writes a file's pages out and drops those behind its first `kept` bytes from memory.
pub fn forget_tail(path: &Path, kept: i64) {
    let file = std::fs::File::open(path).unwrap();
    file.sync_all().unwrap();
    // SAFETY: advice about a descriptor that is open.
    let done = unsafe { libc::posix_fadvise(file.as_raw_fd(), kept, 0, libc::POSIX_FADV_DONTNEED) };
    assert_eq!(done, 0);
}

/// A GGUF v3 file built byte by byte.
#[derive(Default, Clone)]
pub struct GgufBuilder {
    pub kvs: Vec<Vec<u8>>,
    pub tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
    pub alignment: u64,
}

pub fn kv(key: &str, ty: u32, value: &[u8]) -> Vec<u8> {
    let mut out = (key.len() as u64).to_le_bytes().to_vec();
    out.extend(key.as_bytes());
    out.extend(ty.to_le_bytes());
    out.extend(value);
    out
}

impl GgufBuilder {
    /// `n` F32 tensors of `len` values, filled by a pattern.
    pub fn sample(n: usize, len: u64) -> GgufBuilder {
        let mut b = GgufBuilder {
            alignment: 32,
            ..GgufBuilder::default()
        };
        b.kvs.push(kv(
            "general.architecture",
            8,
            &[5u64.to_le_bytes().as_slice(), b"llama"].concat(),
        ));
        for i in 0..n {
            let len = len + i as u64 * 3;
            let data = (0..len * 4)
                .map(|j| ((j * 7 + i as u64 * 13) % 251) as u8)
                .collect();
            b.tensors
                .push((format!("blk.{i}.weight"), vec![len], 0, data));
        }
        b
    }

    pub fn bytes(&self) -> Vec<u8> {
        let a = self.alignment as usize;
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.kvs.len() as u64).to_le_bytes());
        self.kvs.iter().for_each(|kv| out.extend(kv));
        let mut at = 0;
        for (name, dims, ty, data) in &self.tensors {
            out.extend((name.len() as u64).to_le_bytes());
            out.extend(name.as_bytes());
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(ty.to_le_bytes());
            out.extend((at as u64).to_le_bytes());
            at += data.len().next_multiple_of(a);
        }
        out.resize(out.len().next_multiple_of(a), 0);
        for (_, _, _, data) in &self.tensors {
            out.extend(data);
            out.resize(out.len().next_multiple_of(a), 0);
        }
        out
    }

    pub fn write(&self, path: &Path) {
        std::fs::write(path, self.bytes()).unwrap();
    }
}
