//! Generates shell completions and man pages from the definition of `margay`'s command line.

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::args::definition;
use crate::command::{Invocation, StandaloneCommand};
use crate::error::{CommandFailure, CommandResult};

pub(crate) const COMPLETIONS: &str = "\
Examples:
  source <(margay completions bash)
  margay completions zsh > /usr/local/share/zsh/site-functions/_margay
  margay completions fish > ~/.config/fish/completions/margay.fish

`make install` and the Debian package have put them in place already.";

#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// The shell
    pub(crate) shell: Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManPages {
    /// Folder for the man pages, created if missing
    pub(crate) folder: PathBuf,
}

/// The section "SEE ALSO" at the end of every man page. `margay-ipam`(8) is the man page of the plugin;
/// `margay-ipam`(1) is the man page of the command `margay ipam`.
const SEE_ALSO: &str = "\
.SH \"SEE ALSO\"
.BR margay (1),
.BR margay\\-ipam (8),
the plugin
";

impl StandaloneCommand for Completions {
    /// Prints the completion script of a shell.
    fn run(&self, invocation: &mut Invocation<'_>) -> CommandResult<u8> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut definition(invocation.drivers), "margay", &mut script);
        invocation.out.write_all(&script)?;
        invocation.out.flush()?;
        Ok(0)
    }
}

impl StandaloneCommand for ManPages {
    /// Writes a man page for each subcommand into a folder, which is created if it does not exist.
    fn run(&self, invocation: &mut Invocation<'_>) -> CommandResult<u8> {
        let folder = &self.folder;
        let mut command = definition(invocation.drivers).disable_help_subcommand(true);
        command.build();
        fs::create_dir_all(folder).and_then(|()| write_pages(command, folder)).map_err(|error| {
            CommandFailure::new(format!("cannot write man pages into {}: {error}", folder.display()))
                .hint("name a folder that you can write to")
        })?;
        Ok(0)
    }
}

fn write_pages(command: Command, folder: &Path) -> std::io::Result<()> {
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
        write_pages(inner.clone(), folder)?;
    }
    let version = format!("margay {}", env!("CARGO_PKG_VERSION"));
    let man = Man::new(command).source(version).manual("Margay");
    let mut page = Vec::new();
    man.render(&mut page)?;
    page.extend_from_slice(SEE_ALSO.as_bytes());
    fs::write(folder.join(man.get_filename()), page)
}
