use std::fs::File;
use std::io::IsTerminal;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use super::args::{HeadersArg, Mount};
use super::exit::CliError;
use super::fit_files::Advisor;
use super::library::Shelves;
use super::logging::{self, Logging};
use super::metrics::Metrics;
use super::resolve;
use super::rights::{self, Kept};
use super::shown::{OneModel, Shown};
use super::{background, options, overlay, service};
use crate::layout::SplitOptions;
use crate::library::{Layout, Library, Scan, Watch};
use crate::model::{self, ModelError};
use crate::mount::{End, MountOptions, PointError, check, clear_stale, holds, serve};
use crate::source::{keep_sources_in, limit_open_files};
use crate::vfs::{FileContent, Fs, Ownership, ViewFile};
use crate::views::ViewOptions;

/// Requests served at a time.
const THREADS: usize = 4;
/// Descriptors for everything but sources: the connection, its clones, the log, a directory being read.
const KEPT_DESCRIPTORS: usize = 48;
/// Hard limits go up to a billion; more open files than this gain nothing.
const MAX_SOURCES_OPEN: usize = 100_000;

pub(super) fn run(given: &Mount, verbose: u8, quiet: bool) -> Result<(), CliError> {
    let mut args = Mount {
        options: given.options.clone(),
        source: given.source.clone(),
        mountpoint: given.mountpoint.clone(),
        log_file: given.log_file.clone(),
        overrides: given.overrides.clone(),
        user: given.user.clone(),
        fit: given.fit.clone(),
        ..*given
    };
    let flags = options::apply(&mut args)?;
    let child = background::is_child();
    if !args.foreground && !child {
        return background::start();
    }
    let source = std::path::absolute(&args.source)
        .map_err(|e| CliError::Failed(format!("{}: {e}", args.source.display())))?;
    if let Some(log) = &args.log_file {
        not_a_source(log, &source)?;
    }
    logging::start(Logging {
        verbose,
        quiet,
        format: args.log_format,
        file: args.log_file.as_deref(),
        background: child,
    })
    .map_err(|e| CliError::Failed(format!("cannot open the log: {e}")))?;
    if let Some(user) = &args.user {
        rights::become_user(user)?;
    }
    // Before mounting, so that a port that is taken is an error.
    let metrics = args.metrics.map(Metrics::listen).transpose()?;
    let point = free(&args.mountpoint, &source, flags.nonempty)
        .map_err(|e| CliError::Mount(e.to_string()))?;
    let view_options = ViewOptions {
        kind: args.view.into(),
        clean: args.headers == HeadersArg::Clean,
        split: SplitOptions::from(&args.split),
    };
    let shown = Shown {
        options: view_options,
        changes: overlay::read(&args.overrides)?,
        advisor: Arc::new(Advisor::new(&args.fit)?),
    };
    use_all_descriptors();
    let Served {
        fs,
        status,
        shelves,
        sources,
    } = match library(&source, &args, &point)? {
        Some((watch, scan)) => many(watch, scan, &point, shown, flags.ownership),
        None => one(&source, &point, shown, flags.ownership)?,
    };
    let status = format!(
        "{}: serving {status} on {}",
        source.display(),
        point.display()
    );
    log::info!("{status}");
    let mount_options = MountOptions {
        fsname: flags
            .fsname
            .unwrap_or_else(|| source.to_string_lossy().into_owned()),
        allow_other: flags.allow_other,
        allow_root: flags.allow_root,
        default_permissions: flags.default_permissions,
        auto_unmount: flags.auto_unmount,
        cache: args.cache.into(),
        threads: THREADS,
    };
    let kept = Kept {
        cache: mount_options.cache,
        landlock: !args.no_landlock,
        sources,
    };
    let unmounter = rights::start_unmounter()?;
    let ready = || {
        if let Some(metrics) = metrics {
            metrics.serve(Arc::clone(&fs))?;
        }
        if let Some(shelves) = shelves {
            let fs = Arc::clone(&fs);
            let named = thread::Builder::new().name("library".to_owned());
            named.spawn(move || shelves.follow(&fs))?;
        }
        service::watch(&point)?;
        service::ready(&status);
        if child {
            background::detach();
            return background::report_ready();
        }
        if std::io::stderr().is_terminal() {
            log::info!(
                "mounted; stop with Ctrl-C or `ggufuse unmount {}`",
                point.display()
            );
        }
        Ok(())
    };
    let end = serve(
        Arc::clone(&fs),
        &point,
        &mount_options,
        &unmounter,
        || kept.give_up(),
        ready,
    );
    service::stopping();
    match end {
        Ok(End::Signal) => log::info!("{}: unmounted on a signal", point.display()),
        Ok(End::External) => log::info!("{}: unmounted", point.display()),
        Err(error) => return Err(CliError::Mount(explain(&point, &error))),
    }
    Ok(())
}

/// The file system of a mount.
struct Served {
    fs: Arc<Fs>,
    /// What is in it, for people.
    status: String,
    /// What it follows, where it is a library.
    shelves: Option<Shelves>,
    /// The folders that sources are opened in.
    sources: Vec<PathBuf>,
}

/// The library that `source` is: a directory, unless it is that of one model and nobody says otherwise.
fn library(source: &Path, args: &Mount, point: &Path) -> Result<Option<(Watch, Scan)>, CliError> {
    let layout = args.layout;
    if !source.is_dir() {
        return match layout {
            Some(_) => Err(CliError::Usage(format!(
                "--layout: {} is not a directory",
                source.display()
            ))),
            None => Ok(None),
        };
    }
    let root = source
        .canonicalize()
        .map_err(|e| CliError::Failed(format!("{}: {e}", source.display())))?;
    let mut watch = Watch::new(Library {
        follow_outside: args.follow_outside,
        root,
        layout: layout.map_or(Layout::Auto, Layout::from),
        without: Some(point.to_owned()),
    });
    let scan = watch.scan();
    let one_model = match scan.items.as_slice() {
        [] => true,
        [item] => item.folder.is_empty() && !scan.structured,
        _ => false,
    };
    // Several, of which all but one lead out of the library, are no single model either.
    let many = || matches!(model::find(source), Err(ModelError::ManyModels { .. }));
    if layout.is_none() && one_model && !many() {
        return Ok(None);
    }
    if !args.follow_outside {
        let failed = |e| CliError::Failed(format!("{}: {e}", watch.library().root.display()));
        keep_sources_in(&watch.library().root).map_err(failed)?;
    }
    Ok(Some((watch, scan)))
}

fn many(watch: Watch, scan: Scan, point: &Path, shown: Shown, ownership: Ownership) -> Served {
    let status = format!("{} model(s) (library)", scan.items.len());
    let sources = vec![match watch.library().follow_outside {
        true => "/".into(),
        false => watch.library().root.clone(),
    }];
    let mut shelves = Shelves::new(watch, point, shown);
    let fs = Fs::library(shelves.folder(scan), ownership);
    Served {
        fs: Arc::new(fs),
        status,
        shelves: Some(shelves),
        sources,
    }
}

fn one(
    source: &Path,
    point: &Path,
    shown: Shown,
    ownership: Ownership,
) -> Result<Served, CliError> {
    let view = shown.load(source, point)?;
    if let Some(inside) = view.sources.iter().find(|s| holds(point, s.path())) {
        let (point, inside) = (point.display(), inside.path().display());
        return Err(CliError::Mount(format!(
            "{point}: the source {inside} lies inside; it could not be reached"
        )));
    }
    let fixed = |file: &&ViewFile| matches!(file.content, FileContent::Fixed(_));
    let files = view.files.iter().filter(fixed).count();
    let status = format!("{files} file(s) ({})", view.kind);
    let opened = view.sources.iter().map(|source| source.path());
    let sources = rights::folders(opened.chain([source]));
    let plan = OneModel {
        source: source.to_owned(),
        point: point.to_owned(),
        shown,
    };
    let fs = Fs::model(Arc::new(plan), view, ownership);
    Ok(Served {
        fs: Arc::new(fs.map_err(|e| CliError::Failed(e.to_string()))?),
        status,
        shelves: None,
        sources,
    })
}

/// The mount point, checked. A mount of ours whose process is gone, which serves nobody, is taken off first.
fn free(point: &Path, source: &Path, nonempty: bool) -> Result<PathBuf, PointError> {
    loop {
        match check(point, source, nonempty) {
            Err(PointError::Stale(path)) if clear_stale(&resolve(point)).unwrap_or(false) => {
                log::warn!("{}: cleared a mount whose process is gone", path.display());
            }
            checked => return checked,
        }
    }
}

/// Every shard is an open descriptor: sets of more than 1,000 are common, and so is a soft limit of 1,024. What is over
/// the hard limit is opened and closed as needed.
fn use_all_descriptors() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: both calls take a pointer to a live rlimit.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) != 0 {
            return;
        }
        let soft = limit.rlim_cur;
        limit.rlim_cur = limit.rlim_max;
        if libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) != 0 {
            limit.rlim_cur = soft;
        }
    }
    let all = usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX);
    limit_open_files(all.saturating_sub(KEPT_DESCRIPTORS).min(MAX_SOURCES_OPEN));
}

/// Appending log lines to the model would destroy it.
fn not_a_source(log: &Path, source: &Path) -> Result<(), CliError> {
    let id = |path: &Path| {
        std::fs::metadata(path)
            .ok()
            .map(|meta| (meta.dev(), meta.ino()))
    };
    let Some(log_id) = id(log) else {
        return Ok(());
    };
    let mut files: Vec<PathBuf> = match model::find(source) {
        Ok(found) => found.paths().map(Path::to_owned).collect(),
        Err(_) => Vec::new(),
    };
    if let Ok(root) = source
        .canonicalize()
        .and_then(|root| root.read_dir().map(|_| root))
    {
        let library = Library {
            root,
            layout: Layout::Auto,
            without: None,
            follow_outside: true,
        };
        let items = library.scan(&mut |_| {}).items;
        files.extend(
            items
                .iter()
                .flat_map(|item| item.paths().map(Path::to_owned)),
        );
    }
    if files.iter().any(|file| id(file) == Some(log_id)) {
        return Err(CliError::Usage(format!(
            "--log-file {}: that is the model itself",
            log.display()
        )));
    }
    Ok(())
}

/// A mount error with what is usually missing.
fn explain(point: &Path, error: &std::io::Error) -> String {
    let hint = if !Path::new("/dev/fuse").exists() {
        " (/dev/fuse is missing: load the fuse module, or give the container the device)"
    } else if File::options()
        .read(true)
        .write(true)
        .open("/dev/fuse")
        .is_err()
    {
        " (/dev/fuse is closed to this user; distributions open it to all: `chmod 666 /dev/fuse`)"
    } else {
        match error.kind() {
            std::io::ErrorKind::PermissionDenied => {
                " (as an ordinary user: fusermount3 must be installed, allow_other needs user_allow_other in /etc/fuse.conf, and AppArmor may forbid this mount point)"
            }
            std::io::ErrorKind::NotFound => {
                " (is fusermount3 installed? Debian's package is fuse3)"
            }
            _ => "",
        }
    };
    format!("{}: cannot mount: {error}{hint}", point.display())
}
