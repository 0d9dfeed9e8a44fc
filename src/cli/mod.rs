//! The command: the only place that reads arguments, prints, chooses defaults and exits. One file per verb.

mod args;
mod background;
mod check;
mod exit;
mod fit;
mod fit_files;
mod fit_flags;
mod gpus;
mod inspect;
mod library;
mod log_limit;
mod logging;
mod merge;
mod metrics;
mod mount;
mod mount_helper;
mod options;
mod overlay;
mod plan;
mod progress;
mod rights;
mod service;
mod shown;
mod split;
mod status;
mod unmount;
mod verify;
mod wish;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use args::{Args, HeadersArg, Verb};
use exit::CliError;
use merge::Merge;

/// Parses the arguments, runs the verb, prints its error, and returns the documented exit code.
pub fn main() -> ExitCode {
    if mount_helper::is_called() {
        return execute(mount_helper::USAGE, mount_helper::run, mount_helper::code);
    }
    execute(exit::USAGE, run, CliError::code)
}

/// Parses the arguments and runs the command; `usage` and `code` are the exit codes of what can go wrong.
fn execute<A: Parser>(
    usage: u8,
    run: impl FnOnce(A) -> Result<(), CliError>,
    code: impl FnOnce(&CliError) -> u8,
) -> ExitCode {
    let words = fit_flags::with_two_dashes(std::env::args_os());
    let args = match A::try_parse_from(words) {
        Ok(args) => args,
        Err(error) => {
            // Help and version are no errors: they go to stdout and exit 0.
            let code = if error.use_stderr() { usage } else { exit::OK };
            drop(error.print());
            return ExitCode::from(code);
        }
    };
    match run(args) {
        Ok(()) => ExitCode::from(exit::OK),
        Err(error) => {
            drop(writeln!(std::io::stderr(), "ggufuse: {error}"));
            ExitCode::from(code(&error))
        }
    }
}

/// Whether the `-o LIST` of `mount` is understood; the list is not acted on.
///
/// # Errors
/// Why not, for people.
pub fn check_mount_options(list: &str) -> Result<(), String> {
    let words = ["ggufuse", "mount", "source", "mountpoint"];
    let args = Args::try_parse_from(words).map_err(|error| error.to_string())?;
    let Verb::Mount(mut mount) = args.verb else {
        return Err("not a mount".to_owned());
    };
    mount.options.push(list.to_owned());
    options::apply(&mut mount)
        .map(drop)
        .map_err(|error| error.to_string())
}

/// A mount point as the mount table names it. Of a stale one only the parent can be resolved.
fn resolve(path: &Path) -> PathBuf {
    let stale = || Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?));
    let resolved = path.canonicalize().ok().or_else(stale);
    resolved
        .or_else(|| std::path::absolute(path).ok())
        .unwrap_or_else(|| path.to_owned())
}

fn run(args: Args) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    match args.verb {
        Verb::Mount(verb) => {
            drop(out);
            mount::run(&verb, args.verbose, args.quiet)
        }
        Verb::Unmount { mountpoint, lazy } => unmount::run(&resolve(&mountpoint), lazy),
        Verb::Status { mountpoint, json } => {
            status::run(mountpoint.as_deref().map(resolve), json, &mut out)
        }
        Verb::Split {
            source,
            prefix,
            split,
            overrides,
            write,
        } => split::run(&source, &prefix, &split, &overrides, write, out),
        Verb::Merge {
            source,
            out,
            headers,
            delete_splits,
            overrides,
            write,
        } => merge::run(&Merge {
            source: &source,
            out: &out,
            clean: headers == HeadersArg::Clean,
            delete_splits,
            overrides: &overrides,
            write,
        }),
        Verb::Plan {
            source,
            split,
            overrides,
            json,
        } => plan::run(&source, &split, &overrides, json, &mut out),
        Verb::Inspect {
            source,
            tensors,
            overrides,
            json,
        } => inspect::run(&source, tensors, &overrides, json, &mut out),
        Verb::Fit(verb) => verb.run(&mut out),
        Verb::Check { source } => check::run(&source, &mut out),
        Verb::Gpus { root, json } => gpus::run(&root, json, &mut out),
        Verb::Unmounter => {
            drop(out);
            rights::unmounter()
        }
        Verb::ProbeGpus { backend, root } => {
            drop(out);
            gpus::probe(backend, &root)
        }
        Verb::Verify { a, b, hash } => {
            drop(out);
            verify::run(&a, &b, hash)
        }
        Verb::Completions { shell } => {
            clap_complete::generate(shell, &mut Args::command(), "ggufuse", &mut out);
            Ok(())
        }
        Verb::Man { dir: None } => Ok(clap_mangen::Man::new(Args::command()).render(&mut out)?),
        Verb::Man { dir: Some(dir) } => {
            clap_mangen::generate_to(Args::command(), &dir)?;
            let helper = clap_mangen::Man::new(mount_helper::Helper::command()).section("8");
            Ok(helper.render(&mut File::create(dir.join(mount_helper::PAGE))?)?)
        }
    }
}
