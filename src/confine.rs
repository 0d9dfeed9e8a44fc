//! Giving up rights: becoming another user, dropping capabilities, and confining this process to the files that it needs.
//!
//! All but the user's numbers belongs to a thread, and to the threads and processes that it starts from then on: it is done
//! before the first other thread is there.

use std::ffi::{CStr, CString};
use std::io;
use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, path_beneath_rules,
};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    configure_capability_in_ambient_set, remove_capability_from_bounding_set, set_capabilities,
    set_keep_capabilities, set_no_new_privs,
};

pub use rustix::thread::CapabilitySet as Capabilities;

/// What this is written for. What an older kernel lacks is left out there.
const LANDLOCK: ABI = ABI::V5;

/// A user to become.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    uid: libc::uid_t,
    gid: libc::gid_t,
    /// The name, whose groups are taken as well; numbers alone have no others.
    name: Option<CString>,
}

impl User {
    /// The user of a name, or of `UID:GID`.
    ///
    /// # Errors
    /// When there is none.
    pub fn find(text: &str) -> Result<User, String> {
        if let Some((uid, gid)) = text.split_once(':') {
            let number = |n: &str| {
                n.parse()
                    .map_err(|_| format!("{text}: needs NAME or UID:GID"))
            };
            let (uid, gid) = (number(uid)?, number(gid)?);
            let name = None;
            return Ok(User { uid, gid, name });
        }
        let name = CString::new(text).map_err(|e| e.to_string())?;
        let mut entry = std::mem::MaybeUninit::<libc::passwd>::uninit();
        let mut strings = vec![0; 16 << 10];
        let mut found = std::ptr::null_mut();
        // SAFETY: all pointers are to live memory of the length that is given; `entry` is read only where it was filled.
        let failed = unsafe {
            libc::getpwnam_r(
                name.as_ptr(),
                entry.as_mut_ptr(),
                strings.as_mut_ptr(),
                strings.len(),
                &raw mut found,
            )
        };
        if failed != 0 || found.is_null() {
            return Err(format!("{text}: no such user"));
        }
        // SAFETY: the call has filled it, as `found` is not null.
        let entry = unsafe { entry.assume_init() };
        Ok(User {
            uid: entry.pw_uid,
            gid: entry.pw_gid,
            name: Some(name),
        })
    }

    /// Becomes this user for good, with these capabilities alone.
    ///
    /// # Errors
    /// `EPERM` for all but root.
    pub fn become_now(&self, keep: Capabilities) -> io::Result<()> {
        set_keep_capabilities(true)?;
        set_groups(self.name.as_deref(), self.gid)?;
        // SAFETY: neither takes a pointer.
        let failed = unsafe {
            libc::setresgid(self.gid, self.gid, self.gid) != 0
                || libc::setresuid(self.uid, self.uid, self.uid) != 0
        };
        if failed {
            return Err(io::Error::last_os_error());
        }
        set_capabilities(
            None,
            CapabilitySets {
                effective: keep,
                permitted: keep,
                inheritable: CapabilitySet::empty(),
            },
        )?;
        // The change of user has closed /proc/self, which is needed; tracing takes all capabilities of the one traced.
        set_dumpable_behavior(DumpableBehavior::Dumpable)?;
        Ok(())
    }
}

fn set_groups(name: Option<&CStr>, gid: libc::gid_t) -> io::Result<()> {
    let failed = match name {
        // SAFETY: the name ends in NUL.
        Some(name) => unsafe { libc::initgroups(name.as_ptr(), gid) },
        // SAFETY: the list is one group long, as the call is told.
        None => unsafe { libc::setgroups(1, &raw const gid) },
    };
    match failed {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Runs `start`, whose processes have the capability even if the user is not root.
///
/// # Errors
/// Of giving it or taking it back; of `start`.
pub fn lending<T>(
    capability: Capabilities,
    start: impl FnOnce() -> io::Result<T>,
) -> io::Result<T> {
    let before = capabilities(None)?;
    if !before.permitted.contains(capability) {
        return start();
    }
    let inheritable = before.inheritable | capability;
    set_capabilities(
        None,
        CapabilitySets {
            inheritable,
            ..before
        },
    )?;
    configure_capability_in_ambient_set(capability, true)?;
    let started = start();
    clear_ambient_capability_set()?;
    set_capabilities(None, before)?;
    started
}

/// Drops all capabilities but those of `keep` that it has, and the way to others: programs that it starts gain none.
///
/// # Errors
/// Of the system calls; none is known.
pub fn drop_capabilities(keep: Capabilities) -> io::Result<()> {
    clear_ambient_capability_set()?;
    let kept = capabilities(None)?.permitted & keep;
    for capability in CapabilitySet::all().iter() {
        // Only root may, and only where no_new_privs does not do as well.
        if !keep.contains(capability) {
            let _ = remove_capability_from_bounding_set(capability);
        }
    }
    set_capabilities(
        None,
        CapabilitySets {
            effective: kept,
            permitted: kept,
            inheritable: CapabilitySet::empty(),
        },
    )?;
    set_no_new_privs(true)?;
    Ok(())
}

/// What a confined process may still open, each path with all beneath it. What is not there is left out.
#[derive(Debug, Clone, Default)]
pub struct Reach {
    /// For reading.
    pub read: Vec<PathBuf>,
    /// For reading and for running programs.
    pub run: Vec<PathBuf>,
    /// Devices, for reading, writing and ioctl.
    pub devices: Vec<PathBuf>,
}

/// How far the kernel confines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Confined {
    /// As asked.
    Fully,
    /// It is too old for some of it.
    Partly,
    /// It has no Landlock, or it is off.
    Not,
}

/// Confines this thread, and those that it starts from now on, by Landlock: no file may be opened outside `reach`, nothing
/// be written, mounted or unmounted, and no TCP connection be made or listened for. What is open stays open.
///
/// # Errors
/// Of the system calls; that the kernel cannot is none.
pub fn confine(reach: &Reach) -> Result<Confined, RulesetError> {
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let devices: BitFlags<AccessFs> = read | AccessFs::WriteFile | AccessFs::IoctlDev;
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(LANDLOCK))?
        .handle_access(AccessNet::from_all(LANDLOCK))?
        .create()?
        .add_rules(path_beneath_rules(&reach.read, read))?
        .add_rules(path_beneath_rules(&reach.run, read | AccessFs::Execute))?
        .add_rules(path_beneath_rules(&reach.devices, devices))?
        .restrict_self()?;
    Ok(match status.ruleset {
        RulesetStatus::FullyEnforced => Confined::Fully,
        RulesetStatus::PartiallyEnforced => Confined::Partly,
        RulesetStatus::NotEnforced => Confined::Not,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn users_are_found() {
        let root = User::find("root").unwrap();
        assert_eq!((root.uid, root.gid), (0, 0));
        let numbers = User::find("7:8").unwrap();
        assert_eq!((numbers.uid, numbers.gid, numbers.name), (7, 8, None));
        assert!(
            User::find("nobody such")
                .unwrap_err()
                .contains("no such user")
        );
        assert!(User::find("a:b").is_err());
    }

    #[test]
    fn a_confined_thread_reads_what_it_may_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let (inside, outside) = (dir.path().join("in"), dir.path().join("out"));
        for folder in [&inside, &outside] {
            std::fs::create_dir(folder).unwrap();
            std::fs::write(folder.join("f"), b"x").unwrap();
        }
        let open = File::open(outside.join("f")).unwrap();
        let reach = Reach {
            read: vec![inside.clone(), dir.path().join("not there")],
            ..Reach::default()
        };
        // A thread of its own: there is no way back.
        let check = move || {
            let confined = confine(&reach).unwrap();
            if confined == Confined::Not {
                return;
            }
            assert_eq!(std::fs::read(inside.join("f")).unwrap(), b"x");
            let denied = |result: io::Result<File>| {
                let error = result.unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
            };
            denied(File::open(outside.join("f")));
            denied(File::open("/etc/passwd"));
            denied(File::create(inside.join("g")));
            denied(File::options().write(true).open(inside.join("f")));
            let listen = std::net::TcpListener::bind("127.0.0.1:0").map(|_| ());
            assert!(confined == Confined::Partly || listen.is_err());
            let mut one = [0];
            std::os::unix::fs::FileExt::read_at(&open, &mut one, 0).unwrap();
            assert_eq!(&one, b"x", "what is open stays so");
        };
        std::thread::spawn(check).join().unwrap();
    }
}
