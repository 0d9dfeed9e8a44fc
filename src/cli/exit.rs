use crate::diff::DiffError;
use crate::export::ExportError;
use crate::layout::{LayoutError, OverlayError};
use crate::model::ModelError;

/// All went well.
pub(super) const OK: u8 = 0;
const FAILED: u8 = 1;
/// Bad arguments.
pub(super) const USAGE: u8 = 2;
const DOES_NOT_FIT: u8 = 3;
const INVALID: u8 = 4;
const MOUNT: u8 = 5;

/// Why a verb failed. The exit codes are an interface: see `--help`.
#[derive(Debug, thiserror::Error)]
pub(super) enum CliError {
    #[error("{0}")]
    Failed(String),
    #[error("{0}")]
    Usage(String),
    #[error("{0}")]
    DoesNotFit(String),
    #[error("{0}")]
    BadModel(String),
    #[error("{0}")]
    Mount(String),
    #[error("{0}")]
    Model(#[from] ModelError),
    #[error("{0}")]
    Layout(#[from] LayoutError),
    #[error("{0}")]
    Overlay(#[from] OverlayError),
    #[error("{0}")]
    Export(#[from] ExportError),
    #[error("{0}")]
    Diff(#[from] DiffError),
    #[error("cannot write: {0}")]
    Write(#[from] std::io::Error),
    /// The child has said why.
    #[error("not mounted")]
    Child(u8),
}

impl CliError {
    pub(super) fn code(&self) -> u8 {
        match self {
            CliError::Failed(_) | CliError::Write(_) | CliError::Model(ModelError::Io { .. }) => {
                FAILED
            }
            CliError::Usage(_)
            | CliError::Overlay(_)
            | CliError::Model(ModelError::ManyModels { .. }) => USAGE,
            CliError::Mount(_) => MOUNT,
            CliError::BadModel(_) => INVALID,
            CliError::DoesNotFit(_) => DOES_NOT_FIT,
            CliError::Model(ModelError::Invalid { .. } | ModelError::NoModel { .. }) => INVALID,
            CliError::Layout(_)
            | CliError::Export(ExportError::NoRoom { .. } | ExportError::TooLarge { .. }) => {
                DOES_NOT_FIT
            }
            CliError::Export(_) | CliError::Diff(_) => FAILED,
            CliError::Child(code) => *code,
        }
    }
}
