//! Host memory: sysconf and `/proc/meminfo`.

use std::fs;
use std::path::Path;

use super::Host;

/// Host memory now; `/proc` is looked for in `root`.
///
/// # Errors
/// `MemAvailable` cannot be told: the total, and why.
pub(super) fn memory(root: &Path) -> (Host, Option<String>) {
    // SAFETY: sysconf takes no pointers.
    let (pages, size) = unsafe {
        (
            libc::sysconf(libc::_SC_PHYS_PAGES),
            libc::sysconf(libc::_SC_PAGE_SIZE),
        )
    };
    let bytes = u64::try_from(pages).ok().zip(u64::try_from(size).ok());
    let total = bytes.and_then(|(n, size)| n.checked_mul(size)).unwrap_or(0);
    let (available, problem) = match Meminfo::read(root) {
        Ok(meminfo) => match meminfo.bytes("MemAvailable") {
            Some(bytes) => (Some(bytes), None),
            None => (None, Some("/proc/meminfo has no MemAvailable".to_owned())),
        },
        Err(why) => (None, Some(why)),
    };
    (Host { total, available }, problem)
}

/// The text of `/proc/meminfo`.
pub(super) struct Meminfo(String);

impl Meminfo {
    pub(super) fn read(root: &Path) -> Result<Meminfo, String> {
        let path = root.join("proc/meminfo");
        let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(Meminfo(text))
    }

    /// A line without its unit.
    fn number(&self, key: &str) -> Option<u64> {
        let value = |line: &str| line.strip_prefix(key)?.strip_prefix(':').map(str::to_owned);
        let value = self.0.lines().find_map(value)?;
        value.split_whitespace().next()?.parse().ok()
    }

    /// A line in kB, as bytes.
    fn bytes(&self, key: &str) -> Option<u64> {
        self.number(key)?.checked_mul(1024)
    }

    /// What llama.cpp takes for free on a GPU whose memory is the host's (ggml-cuda.cu,
    /// `ggml_backend_cuda_get_available_uma_memory`): the free huge pages if there are huge pages, else `MemAvailable`.
    pub(super) fn unified_free(&self) -> Option<u64> {
        let free = match self.number("HugePages_Total") {
            Some(pages) if pages > 0 => self
                .number("HugePages_Free")?
                .checked_mul(self.bytes("Hugepagesize")?),
            _ => self.bytes("MemAvailable"),
        };
        free.filter(|&free| free > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unified_memory_is_what_is_available_or_the_free_huge_pages() {
        let plain = "MemTotal: 100 kB\nMemAvailable:   64 kB\nHugePages_Total:       0\n";
        assert_eq!(Meminfo(plain.to_owned()).unified_free(), Some(65536));
        let huge =
            "MemAvailable: 64 kB\nHugePages_Total: 4\nHugePages_Free: 3\nHugepagesize: 2048 kB\n";
        assert_eq!(
            Meminfo(huge.to_owned()).unified_free(),
            Some(3 * 2048 * 1024)
        );
        for broken in [
            "",
            "MemAvailable:",
            "MemAvailable: 0 kB",
            "MemAvailable: 18446744073709551615 kB",
        ] {
            assert_eq!(Meminfo(broken.to_owned()).unified_free(), None, "{broken}");
        }
    }

    #[test]
    fn without_proc_the_total_is_known_and_the_rest_has_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        let (host, problem) = memory(dir.path());
        assert!(host.total > 0);
        assert_eq!(host.available, None);
        assert!(problem.unwrap().contains("meminfo"));
        let (host, problem) = memory(Path::new("/"));
        assert!(host.available.is_some_and(|a| a <= host.total), "{host:?}");
        assert_eq!(problem, None);
    }
}
