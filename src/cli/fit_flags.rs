//! The flags of llama.cpp that decide about memory, as flags of a verb: under their own names, or with a prefix.

use std::ffi::OsString;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use crate::fit::{FLAGS, Flag, Request, find_flag};

/// Short names of flags that take a file, which are not among those of a request.
const FILE_FLAGS: &[&str] = &["md", "mm"];

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
        letters && (find_flag(name).is_some() || FILE_FLAGS.contains(&name))
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
    /// Sets them in a request.
    pub(super) fn apply(&self, request: &mut Request) -> Result<(), String> {
        self.0
            .iter()
            .try_for_each(|(flag, value)| request.set(flag, value))
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
        command.args(FLAGS.iter().map(Self::arg))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<const PREFIXED: bool> FromArgMatches for FitFlags<PREFIXED> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut found = Vec::new();
        for flag in FLAGS {
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
