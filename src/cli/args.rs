use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};

use super::fit::Fit;
use super::fit_flags::FitFlags;
use crate::gpu;
use crate::layout::SplitOptions;
use crate::library::Layout;
use crate::mount::CacheMode;
use crate::units::{parse_file_size, parse_size};
use crate::views::Kind;

const AFTER: &str = "\
Examples:
  ggufuse mount model-00001-of-00004.gguf /mnt/model        /mnt/model/model.gguf, one merged file
  ggufuse mount model.gguf /mnt/model --split-max-size 2G   /mnt/model/model-00001-of-0000N.gguf …
  ggufuse mount model.gguf /mnt/model --max-file-size fat32 every shard fits FAT32, header included
  ggufuse mount ~/models /mnt/models                        every model below it, each in a directory of its own
  ggufuse plan model.gguf --split-max-size 2G               the shards, without touching anything
  ggufuse unmount /mnt/model
  ggufuse split model.gguf out/model --split-max-size 2G    out/model-00001-of-0000N.gguf …, real files
  ggufuse merge out/model-00001-of-00004.gguf model.gguf --delete-splits
  ggufuse verify model.gguf out/model-00001-of-00004.gguf   whether both hold the same

Exit codes: 0 ok, 1 failed, 2 usage, 3 does not fit, 4 invalid or incomplete GGUF, 5 mount failed.";

/// Show GGUF models merged or sharded, read-only, without copying
#[derive(Debug, Parser)]
#[command(version, after_help = AFTER, max_term_width = 110)]
pub(super) struct Args {
    #[command(subcommand)]
    pub verb: Verb,
    /// Log more (-v: debug, -vv: trace); RUST_LOG overrides
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub verbose: u8,
    /// Log errors only
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
}

#[derive(Debug, Subcommand)]
pub(super) enum Verb {
    /// Mount a model, or a library of models; returns once the mount answers
    Mount(Mount),
    /// Unmount
    #[command(visible_alias = "umount")]
    Unmount {
        /// Where the model is mounted
        mountpoint: PathBuf,
        /// Detach now, even if files are open; also clears a stale mount
        #[arg(short = 'z', long)]
        lazy: bool,
    },
    /// List ggufuse mounts with their sources and statistics
    Status {
        /// Only this mount
        mountpoint: Option<PathBuf>,
        /// For programs
        #[arg(long)]
        json: bool,
    },
    /// Write a model as shards, as llama-gguf-split --split does
    Split {
        /// A GGUF file, a member of a shard set, or a directory with one model
        source: PathBuf,
        /// The shards' names up to -00001-of-0000N.gguf
        prefix: PathBuf,
        #[command(flatten)]
        split: Limits,
        #[command(flatten)]
        overrides: Overrides,
        #[command(flatten)]
        write: WriteArgs,
    },
    /// Write a model as one file, as llama-gguf-split --merge does
    Merge {
        /// A GGUF file, a member of a shard set, or a directory with one model
        source: PathBuf,
        /// The file; it must not exist
        out: PathBuf,
        /// Headers as llama-gguf-split writes them, or clean of split.* keys
        #[arg(long, value_enum, default_value_t)]
        headers: HeadersArg,
        /// Delete each shard once its bytes are durable in the file. After an interruption the same command goes on
        #[arg(long, alias = "delete_splits")]
        delete_splits: bool,
        #[command(flatten)]
        overrides: Overrides,
        #[command(flatten)]
        write: WriteArgs,
    },
    /// Print the shards that a model would be shown as
    Plan {
        /// A GGUF file, a member of a shard set, or a directory with one model
        source: PathBuf,
        #[command(flatten)]
        split: Limits,
        #[command(flatten)]
        overrides: Overrides,
        /// For programs
        #[arg(long)]
        json: bool,
    },
    /// Print version, alignment, keys and shards of a model
    Inspect {
        /// A GGUF file, a member of a shard set, or a directory with one model
        source: PathBuf,
        /// With the tensor table
        #[arg(long)]
        tensors: bool,
        #[command(flatten)]
        overrides: Overrides,
        /// For programs
        #[arg(long)]
        json: bool,
    },
    /// Print the arguments with which llama.cpp fits a model into the memory of the devices
    Fit(Box<Fit>),
    /// Validate a model: exit 0 when it can be served, 4 with every problem named when not
    Check {
        /// A GGUF file, a member of a shard set, or a directory with one model
        source: PathBuf,
    },
    /// Print the GPUs and the memory of this machine, as llama.cpp sees them
    Gpus {
        /// For programs
        #[arg(long)]
        json: bool,
        /// Look for sys and proc in this directory
        #[arg(long, value_name = "DIR", default_value = "/", hide = true)]
        root: PathBuf,
    },
    /// Ask one driver in this process and answer with JSON
    /// The process that unmounts for one that has given up its rights
    #[command(name = super::rights::UNMOUNTER, hide = true)]
    Unmounter,
    #[command(name = gpu::VERB, hide = true)]
    ProbeGpus {
        backend: BackendArg,
        #[arg(long, default_value = "/")]
        root: PathBuf,
    },
    /// Compare two models, whatever files they are divided into: exit 0 when keys and tensors are the same, 1 when not
    Verify {
        /// A GGUF file, a member of a shard set, a piece of a file, or a directory with one model; also on a mount
        a: PathBuf,
        /// Another one
        b: PathBuf,
        /// Print the SHA-256 of every tensor
        #[arg(long)]
        hash: bool,
    },
    /// Print shell completions
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page
    Man {
        /// Write the pages of all verbs and of mount.fuse.ggufuse into this folder instead
        #[arg(long)]
        dir: Option<PathBuf>,
    },
}

#[derive(Debug, ClapArgs)]
pub(super) struct Mount {
    /// A GGUF file, a member of a shard set, a raw piece of a file, a directory with one model, or one with many
    pub source: PathBuf,
    /// An empty directory
    pub mountpoint: PathBuf,
    /// What to show: of a single file its shards, of a set the merged file, unless told otherwise
    #[arg(long, value_enum, default_value_t)]
    pub view: ViewArg,
    /// Shows all models below SOURCE, a directory of this layout [default: told by its structure]
    #[arg(long, value_enum)]
    pub layout: Option<LayoutArg>,
    /// Headers of a merged view: as `llama-gguf-split --merge` writes them, or clean of split.* keys
    #[arg(long, value_enum, default_value_t)]
    pub headers: HeadersArg,
    /// Whether the kernel caches file pages a second time: auto does so for files that are read in small pieces
    #[arg(long, value_enum, default_value_t)]
    pub cache: CacheArg,
    #[command(flatten)]
    pub split: Limits,
    #[command(flatten)]
    pub overrides: Overrides,
    #[command(flatten)]
    pub fit: FitFlags<true>,
    /// Stay in the foreground
    #[arg(short, long)]
    pub foreground: bool,
    /// Mount options: allow_other, allow_root, auto_unmount, default_permissions, nonempty, ro, nosuid, nodev,
    /// fsname=NAME, uid=N, gid=N, umask=OCTAL, and the long options above as key=value
    #[arg(short, value_name = "OPTIONS", action = clap::ArgAction::Append)]
    pub options: Vec<String>,
    /// Ignore mount options that are not known
    #[arg(long)]
    pub sloppy: bool,
    /// Log to this file (default in the background: syslog)
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// What log lines look like
    #[arg(long, value_enum, default_value_t, value_name = "FORMAT")]
    pub log_format: LogFormat,
    /// Serve as this user, NAME or UID:GID; only root can
    #[arg(long, value_name = "USER")]
    pub user: Option<String>,
    /// Of a library, show models behind symlinks that lead out of it as well
    #[arg(long)]
    pub follow_outside: bool,
    /// Do not confine the process to the folders of its sources: for sources that are symlinks to folders that change
    #[arg(long)]
    pub no_landlock: bool,
    /// Answer Prometheus at http://ADDR/metrics: a port of this machine, or ADDRESS:PORT
    #[arg(long, value_name = "ADDR", value_parser = parse_listen)]
    pub metrics: Option<SocketAddr>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum LayoutArg {
    /// Each directory's own
    Auto,
    /// Folders of GGUF files
    Plain,
    /// Hugging Face's cache
    HuggingFace,
    /// llama.cpp's cache
    LlamaCpp,
    /// LM Studio's folders
    LmStudio,
    /// Ollama's store
    Ollama,
}

impl From<LayoutArg> for Layout {
    fn from(arg: LayoutArg) -> Layout {
        match arg {
            LayoutArg::Auto => Layout::Auto,
            LayoutArg::Plain => Layout::Plain,
            LayoutArg::HuggingFace => Layout::HuggingFace,
            LayoutArg::LlamaCpp => Layout::LlamaCpp,
            LayoutArg::LmStudio => Layout::LmStudio,
            LayoutArg::Ollama => Layout::Ollama,
        }
    }
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
pub(super) enum ViewArg {
    #[default]
    Auto,
    Merged,
    Shards,
}

impl From<ViewArg> for Kind {
    fn from(arg: ViewArg) -> Kind {
        match arg {
            ViewArg::Auto => Kind::Auto,
            ViewArg::Merged => Kind::Merged,
            ViewArg::Shards => Kind::Shards,
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum LogFormat {
    /// For people
    #[default]
    Text,
    /// A JSON object a line
    Json,
}

/// A port alone is one of the loopback interface: nobody else gets in unless asked in.
pub(super) fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    match text.parse::<u16>() {
        Ok(port) => Ok((Ipv4Addr::LOCALHOST, port).into()),
        Err(_) => text
            .parse()
            .map_err(|_| "needs PORT or ADDRESS:PORT, as 9464 or [::1]:9464".to_owned()),
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum HeadersArg {
    #[default]
    Peer,
    Clean,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
pub(super) enum CacheArg {
    /// Direct, but through the page cache for files that were read in small pieces
    #[default]
    Auto,
    /// Never, except for maps
    Direct,
    /// Always
    Page,
    /// As auto; but a file that is identical to its source is read by the kernel itself, unchecked (root)
    Passthrough,
}

impl From<CacheArg> for CacheMode {
    fn from(arg: CacheArg) -> CacheMode {
        match arg {
            CacheArg::Auto => CacheMode::Auto,
            CacheArg::Direct => CacheMode::Direct,
            CacheArg::Page => CacheMode::Page,
            CacheArg::Passthrough => CacheMode::Passthrough,
        }
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum BackendArg {
    Cuda,
    Rocm,
}

impl From<BackendArg> for gpu::Backend {
    fn from(arg: BackendArg) -> gpu::Backend {
        match arg {
            BackendArg::Cuda => gpu::Backend::Cuda,
            BackendArg::Rocm => gpu::Backend::Rocm,
        }
    }
}

#[derive(Debug, Clone, Copy, ClapArgs)]
pub(super) struct Limits {
    /// A new shard every N tensors [default: 128 when no limit is given]
    #[arg(long, alias = "split_max_tensors", value_name = "N", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "split_max_size")]
    pub split_max_tensors: Option<u64>,
    /// Bytes of tensor data per shard, headers not counted: 2G, 500MiB
    #[arg(long, alias = "split_max_size", value_name = "SIZE", value_parser = parse_size)]
    pub split_max_size: Option<u64>,
    /// Bytes of a whole shard file, never exceeded: 2G, 500MiB, or fat32
    #[arg(long, value_name = "SIZE|fat32", value_parser = parse_file_size)]
    pub max_file_size: Option<u64>,
    /// Keep tensors out of the first shard
    #[arg(long, alias = "no_tensor_first_split")]
    pub no_tensor_first_split: bool,
}

/// How files are written.
#[derive(Debug, Clone, Copy, ClapArgs)]
pub(super) struct WriteArgs {
    /// Say what would be written, and write nothing
    #[arg(long, alias = "dry_run")]
    pub dry_run: bool,
    /// Read back what was written and compare, before anything gets its name or is deleted
    #[arg(long)]
    pub verify: bool,
}

/// Keys that differ from the source's.
#[derive(Debug, Clone, Default, ClapArgs)]
pub(super) struct Overrides {
    /// Set a key. TYPE is int, float, bool or str as for llama.cpp, or u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, or
    /// arr[TYPE] with a list: arr[u32]:[1,2]. Int and float keep the type that the key has
    #[arg(long, value_name = "KEY=TYPE:VALUE,…")]
    pub override_kv: Vec<String>,
    /// Remove a key
    #[arg(long, value_name = "KEY")]
    pub remove_kv: Vec<OsString>,
    /// Set a key to the text of a file, for instance tokenizer.chat_template
    #[arg(long, value_name = "KEY=FILE")]
    pub set_kv_file: Vec<OsString>,
    /// Several of these at once, from a TOML file; the options win over it
    #[arg(long, value_name = "FILE.toml")]
    pub overlay: Option<PathBuf>,
}

impl From<&Limits> for SplitOptions {
    fn from(s: &Limits) -> SplitOptions {
        SplitOptions {
            max_tensors: s.split_max_tensors,
            max_size: s.split_max_size,
            max_file_size: s.max_file_size,
            no_tensor_first: s.no_tensor_first_split,
        }
    }
}
