//! The `ggufuse` command.

fn main() -> std::process::ExitCode {
    ggufuse::cli::main()
}
