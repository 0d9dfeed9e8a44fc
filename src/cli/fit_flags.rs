//! The flags of llama.cpp that decide about memory, and those that say what is there beside the model, as flags of a
//! verb: under their own names, or with a prefix.

use std::ffi::OsString;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use crate::fit::{FLAGS, Flag, find_flag};

pub(super) const DEVICE: &str = "device";
pub(super) const MMPROJ: &str = "mmproj";
pub(super) const DRAFT: &str = "model-draft";
pub(super) const SPEC_TYPE: &str = "spec-type";

/// What is planned for beside the model and its parameters.
const BESIDE: &[Flag] = &[
    Flag {
        name: DEVICE,
        aliases: &[],
        value: Some("NAME=FREE[/TOTAL]"),
        help: "Plan for this device instead of those of this machine, in bytes or with a unit: CUDA0=23GiB/24GiB (repeatable); CPU is the host",
    },
    Flag {
        name: MMPROJ,
        aliases: &["mm"],
        value: Some("FILE"),
        help: "A multimodal projector, loaded beside the model",
    },
    Flag {
        name: DRAFT,
        aliases: &["md", "spec-draft-model"],
        value: Some("FILE"),
        help: "A draft model, loaded beside the model",
    },
    Flag {
        name: SPEC_TYPE,
        aliases: &[],
        value: Some("TYPE"),
        help: "Draft with the model's own MTP layers: draft-mtp",
    },
];

fn all_flags() -> impl Iterator<Item = &'static Flag> {
    FLAGS.iter().chain(BESIDE)
}

fn find(name: &str) -> Option<&'static Flag> {
    let beside = || {
        BESIDE
            .iter()
            .find(|f| f.name == name || f.aliases.contains(&name))
    };
    find_flag(name).or_else(beside)
}

/// Words of a command line in which llama.cpp's short names of several letters, as `-ngl`, have the second dash that the
/// parser wants. Only those of the verb `fit`.
pub(super) fn with_two_dashes(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let words: Vec<OsString> = words.collect();
    let mut rest = words.iter().skip(1);
    let verb = rest.find(|word| !word.as_encoded_bytes().starts_with(b"-"));
    if verb.is_none_or(|verb| verb != "fit") {
        return words;
    }
    words.into_iter().map(two_dashes).collect()
}

fn two_dashes(word: OsString) -> OsString {
    let known = |name: &str| {
        let letters = name.len() > 1 && !name.starts_with('-');
        letters && find(name).is_some()
    };
    match word.to_str().and_then(|w| w.strip_prefix('-')) {
        Some(name) if known(name) => format!("--{name}").into(),
        _ => word,
    }
}

/// Flags in the order they were given, with their values.
#[derive(Debug, Clone, Default)]
pub(super) struct FitFlags<const PREFIXED: bool>(Vec<(&'static Flag, String)>);

impl<const PREFIXED: bool> FitFlags<PREFIXED> {
    /// Flags and values in the order they were given; what was not given is not there.
    pub(super) fn given(&self) -> &[(&'static Flag, String)] {
        &self.0
    }

    /// Adds a flag by the name it has on the command line, without dashes; true if there is one of that name and it takes
    /// a value, or none, as here.
    pub(super) fn add(&mut self, name: &str, value: Option<&str>) -> bool {
        let same = |flag: &&Flag| {
            let mut names = flag.aliases.iter().chain([&flag.name]);
            names.any(|of| Self::name(of) == name)
        };
        match all_flags().find(same) {
            Some(flag) if flag.value.is_some() == value.is_some() => {
                self.0.push((flag, value.unwrap_or_default().to_owned()));
                true
            }
            _ => false,
        }
    }

    fn name(flag: &str) -> String {
        match flag.strip_prefix("fit-") {
            Some(_) => flag.to_owned(),
            None if PREFIXED => format!("fit-{flag}"),
            None => flag.to_owned(),
        }
    }

    fn arg(flag: &'static Flag) -> Arg {
        let name = Self::name(flag.name);
        let mut arg = Arg::new(name.clone()).long(name).help(flag.help);
        for alias in flag.aliases {
            let mut letters = alias.chars();
            arg = match (letters.next(), letters.next()) {
                (Some(letter), None) if !PREFIXED => arg.short(letter),
                _ => arg.visible_alias(Self::name(alias)),
            };
        }
        arg = arg.help_heading("llama.cpp's flags");
        match flag.value {
            Some(value) => arg
                .value_name(value)
                .action(ArgAction::Append)
                .allow_hyphen_values(true),
            None => arg.action(ArgAction::SetTrue),
        }
    }
}

impl<const PREFIXED: bool> Args for FitFlags<PREFIXED> {
    fn augment_args(command: Command) -> Command {
        command.args(all_flags().map(Self::arg))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<const PREFIXED: bool> FromArgMatches for FitFlags<PREFIXED> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut found = Vec::new();
        for flag in all_flags() {
            let name = Self::name(flag.name);
            if matches.value_source(&name) != Some(ValueSource::CommandLine) {
                continue;
            }
            let places = matches.indices_of(&name).into_iter().flatten();
            if flag.value.is_none() {
                found.extend(places.map(|at| (at, flag, String::new())));
            } else {
                let values = matches.get_many::<String>(&name).into_iter().flatten();
                found.extend(
                    places
                        .zip(values)
                        .map(|(at, value)| (at, flag, value.clone())),
                );
            }
        }
        // Of overrides the first that matches wins, so their order counts.
        found.sort_by_key(|(at, ..)| *at);
        let flags = found.into_iter().map(|(_, flag, value)| (flag, value));
        Ok(FitFlags(flags.collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
