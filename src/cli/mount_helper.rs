//! `mount.fuse.ggufuse`: what mount(8) calls for `mount -t fuse.ggufuse` and for lines of /etc/fstab. The same program
//! under another name; it knows mount(8)'s arguments and exit codes.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::Parser;

use super::args::{Args, Verb};
use super::exit::CliError;
use super::{mount, options};

/// Its name, which mount(8) derives from the type.
const NAME: &str = "mount.fuse.ggufuse";

/// The file name of its manual page.
pub(super) const PAGE: &str = "mount.fuse.ggufuse.8";

/// mount(8): incorrect invocation.
pub(super) const USAGE: u8 = 1;
/// mount(8): mount failure.
const FAILED: u8 = 32;

/// Mount a GGUF model as mount(8) and /etc/fstab do, type fuse.ggufuse
#[derive(Debug, Parser)]
#[command(name = NAME, version, max_term_width = 110, after_help = "\
A line of /etc/fstab:
  /models/m-00001-of-00004.gguf /mnt/m fuse.ggufuse allow_other,nofail,x-systemd.requires-mounts-for=/models 0 0

Exit codes are those of mount(8): 0 ok, 1 usage, 32 mount failed.")]
pub(super) struct Helper {
    /// A GGUF file, a member of a shard set, or a directory
    source: PathBuf,
    /// An empty directory
    mountpoint: PathBuf,
    /// Mount options, see ggufuse-mount(1); those that only mount(8) and systemd read are ignored
    #[arg(short, value_name = "OPTIONS")]
    options: Vec<String>,
    /// Ignore options that are not known
    #[arg(short)]
    sloppy: bool,
    /// Check the arguments, but do not mount
    #[arg(short)]
    fake: bool,
    /// Log more
    #[arg(short)]
    verbose: bool,
    /// There is no /etc/mtab to write; accepted
    #[arg(short)]
    no_mtab: bool,
    /// The type; accepted
    #[arg(short, value_name = "TYPE", value_parser = ["fuse.ggufuse", "ggufuse"])]
    r#type: Option<String>,
}

/// Whether the program was called by the helper's name.
pub(super) fn is_called() -> bool {
    let name = std::env::args_os().next();
    name.is_some_and(|name| Path::new(&name).file_name() == Some(OsStr::new(NAME)))
}

/// Mounts as `ggufuse mount` does with the same options.
///
/// # Errors
/// As `ggufuse mount`; see [`code`].
pub(super) fn run(helper: Helper) -> Result<(), CliError> {
    let lists = helper
        .options
        .into_iter()
        .flat_map(|list| ["-o".into(), list.into()]);
    let flags = [(helper.sloppy, "--sloppy"), (helper.verbose, "--verbose")];
    let flags = flags
        .into_iter()
        .filter(|(given, _)| *given)
        .map(|(_, flag)| flag.into());
    let words: Vec<OsString> = [NAME.into(), "mount".into()]
        .into_iter()
        .chain(flags)
        .chain(lists)
        .chain(["--".into(), helper.source.into(), helper.mountpoint.into()])
        .collect();
    let args = Args::try_parse_from(words).map_err(|error| CliError::Usage(error.to_string()))?;
    let Verb::Mount(mut verb) = args.verb else {
        return Err(CliError::Usage("not a mount".to_owned()));
    };
    if helper.fake {
        return options::apply(&mut verb).map(drop);
    }
    mount::run(&verb, args.verbose, args.quiet)
}

/// mount(8)'s code for an error.
pub(super) fn code(error: &CliError) -> u8 {
    match error {
        CliError::Usage(_) => USAGE,
        CliError::Child(code) => *code,
        _ => FAILED,
    }
}
