//! Any text as the list of `-o`: it is understood or refused, whatever else harmless stands in the list.
#![no_main]

use ggufuse::cli::check_mount_options;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|list: &str| {
    let verdict = check_mount_options(list);
    // A backslash at the end would take the comma.
    if !list.ends_with('\\') {
        let longer = check_mount_options(&format!(",ro,{list},,x-note=1"));
        assert_eq!(verdict.is_ok(), longer.is_ok(), "{verdict:?} {longer:?}");
    }
    if let Err(why) = verdict {
        assert!(!why.is_empty());
    }
});
