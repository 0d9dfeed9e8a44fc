//! `-o` options, as mount(8) passes them: a comma-separated list, `\,` for a comma in a value.

use super::args::{CacheArg, HeadersArg, LayoutArg, LogFormat, Mount, ViewArg, parse_listen};
use super::exit::CliError;
use crate::units::{parse_file_size, parse_size};
use crate::vfs::Ownership;
use clap::ValueEnum;

/// What `-o` decides beyond the long options.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct MountFlags {
    pub allow_other: bool,
    pub allow_root: bool,
    pub auto_unmount: bool,
    pub default_permissions: bool,
    pub nonempty: bool,
    pub fsname: Option<String>,
    pub ownership: Ownership,
}

/// Splits at commas that no backslash escapes.
fn split_list(list: &str) -> Vec<String> {
    let mut items = vec![String::new()];
    let mut chars = list.chars();
    while let Some(c) = chars.next() {
        let Some(last) = items.last_mut() else { break };
        match c {
            '\\' => last.extend(chars.next()),
            ',' => items.push(String::new()),
            c => last.push(c),
        }
    }
    items.retain(|item| !item.is_empty());
    items
}

fn number(text: &str, radix: u32) -> Result<u32, String> {
    u32::from_str_radix(text, radix).map_err(|e| e.to_string())
}

/// Applies every `-o` list to the arguments.
///
/// # Errors
/// `Usage` for an unknown option or a value that cannot be read.
pub(super) fn apply(mount: &mut Mount) -> Result<MountFlags, CliError> {
    let mut flags = MountFlags::default();
    for item in mount
        .options
        .clone()
        .iter()
        .flat_map(|list| split_list(list))
    {
        let (key, value) = item
            .split_once('=')
            .map_or((item.as_str(), None), |(k, v)| (k, Some(v)));
        let bad = |why: String| CliError::Usage(format!("-o {item}: {why}"));
        let need = || value.ok_or_else(|| bad("needs a value".to_owned()));
        match key {
            "allow_other" => flags.allow_other = true,
            "allow_root" => flags.allow_root = true,
            "auto_unmount" => flags.auto_unmount = true,
            "default_permissions" => flags.default_permissions = true,
            "nonempty" => flags.nonempty = true,
            // What every mount of this kind is anyway, and what only mount(8) reads.
            "ro" | "rw" | "suid" | "nosuid" | "dev" | "nodev" | "exec" | "noexec" | "atime"
            | "noatime" | "relatime" | "norelatime" | "strictatime" | "nostrictatime"
            | "diratime" | "nodiratime" | "lazytime" | "nolazytime" | "sync" | "async"
            | "dirsync" | "silent" | "loud" | "auto" | "noauto" | "user" | "users" | "nouser"
            | "owner" | "noowner" | "group" | "nogroup" | "nofail" | "_netdev" | "defaults"
            | "comment" => {}
            key if key.starts_with("x-") || key.starts_with("X-") => {}
            "subtype" if need()? == "ggufuse" => {}
            "uid" => flags.ownership.uid = Some(number(need()?, 10).map_err(bad)?),
            "gid" => flags.ownership.gid = Some(number(need()?, 10).map_err(bad)?),
            "umask" => {
                let mask = number(need()?, 8).map_err(bad)?;
                flags.ownership.umask = u16::try_from(mask)
                    .ok()
                    .filter(|&m| m <= 0o777)
                    .ok_or_else(|| bad("needs an octal mask".to_owned()))?;
            }
            "fsname" => flags.fsname = Some(need()?.to_owned()),
            _ if mount.fit.add(key, value) => {}
            "view" => mount.view = ViewArg::from_str(need()?, false).map_err(bad)?,
            "headers" => mount.headers = HeadersArg::from_str(need()?, false).map_err(bad)?,
            "layout" => {
                mount.layout = Some(LayoutArg::from_str(need()?, false).map_err(bad)?);
            }
            "cache" => mount.cache = CacheArg::from_str(need()?, false).map_err(bad)?,
            "split-max-size" => {
                mount.split.split_max_size = Some(parse_size(need()?).map_err(bad)?)
            }
            "max-file-size" => {
                mount.split.max_file_size = Some(parse_file_size(need()?).map_err(bad)?)
            }
            "split-max-tensors" => {
                let n = need()?.parse().ok().filter(|&n: &u64| n > 0);
                mount.split.split_max_tensors =
                    Some(n.ok_or_else(|| bad("needs a positive number".to_owned()))?);
            }
            "no-tensor-first-split" => mount.split.no_tensor_first_split = true,
            "override-kv" => mount.overrides.override_kv.push(need()?.to_owned()),
            "remove-kv" => mount.overrides.remove_kv.push(need()?.into()),
            "set-kv-file" => mount.overrides.set_kv_file.push(need()?.into()),
            "overlay" => mount.overrides.overlay = Some(need()?.into()),
            // As mount.fuse(8) has it; "user" is an option of mount(8).
            "setuid" => mount.user = Some(need()?.to_owned()),
            "follow-outside" => mount.follow_outside = true,
            "no-landlock" => mount.no_landlock = true,
            "log-format" => mount.log_format = LogFormat::from_str(need()?, false).map_err(bad)?,
            "metrics" => mount.metrics = Some(parse_listen(need()?).map_err(bad)?),
            "log-file" => mount.log_file = Some(need()?.into()),
            _ if mount.sloppy => {}
            _ => return Err(bad("unknown option".to_owned())),
        }
    }
    if flags.auto_unmount && !flags.allow_other && !flags.allow_root {
        return Err(CliError::Usage(
            "-o auto_unmount needs allow_other or allow_root beside it".to_owned(),
        ));
    }
    if mount.split.split_max_size.is_some() && mount.split.split_max_tensors.is_some() {
        return Err(CliError::Usage(
            "--split-max-tensors and --split-max-size exclude each other".to_owned(),
        ));
    }
    Ok(flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_can_be_escaped() {
        assert_eq!(
            split_list(r"a,fsname=x\,y\\z,,b"),
            ["a", r"fsname=x,y\z", "b"]
        );
        assert!(split_list("").is_empty());
    }
}
