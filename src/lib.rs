//! ggufuse shows GGUF models merged or sharded, read-only, without copying.
//!
//! One way data flows: [`source`] -> [`gguf`] -> [`model`] -> [`layout`] -> [`views`] -> [`vfs`] -> [`mount`],
//! or [`views`] -> [`export`] for real files.
//! [`gpu`] knows the machine; [`confine`] gives up rights.
//! A virtual file is a value, a sorted, gapless list of extents. [`cli`] is the only place that
//! reads arguments, prints and exits. ARCHITECTURE.md is the map.

pub mod arch;
pub mod cli;
pub mod confine;
pub mod diff;
pub mod export;
pub mod fit;
pub mod gguf;
pub mod gpu;
pub mod layout;
pub mod library;
pub mod model;
pub mod mount;
pub mod source;
pub mod units;
pub mod vfs;
pub mod views;
