//! The directory that sources have to lie in, where there is one: whatever symlinks say, and whenever they are changed.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, open, openat2};
use rustix::io::Errno;

/// One for the process, as what is opened again later has to lie in it too.
static ROOT: OnceLock<Root> = OnceLock::new();

struct Root {
    path: PathBuf,
    dir: OwnedFd,
}

/// From now on only files in `root`, a path without symlinks, are opened as sources. The first call counts.
///
/// # Errors
/// When `root` cannot be opened.
pub fn keep_sources_in(root: &Path) -> io::Result<()> {
    let dir = open(root, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let path = root.to_owned();
    ROOT.get_or_init(|| Root { path, dir });
    Ok(())
}

/// Opens a file for reading. A FIFO does not block; O_NONBLOCK means nothing to a regular file.
pub(super) fn open_source(path: &Path) -> io::Result<File> {
    match ROOT.get() {
        None => File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path),
        Some(root) => root.open(path),
    }
}

impl Root {
    fn open(&self, path: &Path) -> io::Result<File> {
        let reading = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        if let Ok(below) = path.strip_prefix(&self.path) {
            let how = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
            match openat2(&self.dir, below, reading, Mode::empty(), how) {
                Ok(file) => return Ok(file.into()),
                // An absolute symlink, which may lead back in; somebody renaming just now; a kernel without it.
                Err(Errno::XDEV | Errno::AGAIN | Errno::NOSYS) => {}
                Err(error) => return Err(error.into()),
            }
        }
        // Named first and opened by its name's descriptor then, so that what is checked is what is opened.
        let naming = OFlags::PATH | OFlags::CLOEXEC;
        let how = ResolveFlags::NO_MAGICLINKS;
        let named = match openat2(CWD, path, naming, Mode::empty(), how) {
            Err(Errno::NOSYS) => open(path, naming, Mode::empty()),
            named => named,
        }?;
        let link = format!("/proc/self/fd/{}", named.as_raw_fd());
        if !std::fs::read_link(&link)?.starts_with(&self.path) {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "leads out of the library; --follow-outside allows it",
            ));
        }
        Ok(open(&link, reading, Mode::empty())?.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Read;
    use std::os::unix::fs::symlink;

    fn root(path: &Path) -> Root {
        Root {
            path: path.to_owned(),
            dir: open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap(),
        }
    }

    #[test]
    fn links_may_lead_about_in_it_but_not_out() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().canonicalize().unwrap();
        let lib = base.join("lib");
        fs::create_dir_all(lib.join("sub")).unwrap();
        fs::create_dir(base.join("library")).unwrap();
        for (path, text) in [("lib/f", "in"), ("out", "out"), ("library/f", "beside")] {
            fs::write(base.join(path), text).unwrap();
        }
        let link = |to: &Path, name: &str| symlink(to, lib.join("sub").join(name)).unwrap();
        link(Path::new("../f"), "relative");
        link(&lib.join("f"), "absolute");
        link(&base.join("out"), "outside");
        link(Path::new("../../out"), "up");
        link(&base.join("library/f"), "prefix");
        link(&base, "dir");
        link(Path::new("/proc/self/cwd"), "magic");
        let root = root(&lib);
        let read = |path: &Path| {
            let mut text = String::new();
            root.open(path)?.read_to_string(&mut text)?;
            io::Result::Ok(text)
        };
        for inside in ["f", "sub/relative", "sub/absolute", "sub/dir/lib/f"] {
            assert_eq!(read(&lib.join(inside)).unwrap(), "in", "{inside}");
        }
        for outside in [
            "sub/outside",
            "sub/up",
            "sub/prefix",
            "sub/dir/out",
            "../out",
        ] {
            let error = read(&lib.join(outside)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{outside}");
            assert!(error.to_string().contains("--follow-outside"), "{outside}");
        }
        assert!(read(&base.join("out")).is_err());
        assert!(read(&lib.join("sub/magic/f")).is_err());
        assert_eq!(
            read(&lib.join("no")).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }
}
