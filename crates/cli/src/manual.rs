//! The completions for shells, and the man pages. Both come from the definition of the command itself.

use std::fs;
use std::io::Write;
use std::path::Path;

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;
use datastore::Drivers;

use crate::args::definition;
use crate::error::{Failure, Result};

/// The end of every page. The plugin's page is in another section than the page of `margay ipam`: the names are equal.
const SEE_ALSO: &str = "\
.SH \"SEE ALSO\"
.BR margay (1),
.BR margay\\-ipam (8),
the plugin
";

/// Prints the script by which a shell completes the commands.
pub(crate) fn completions(drivers: &Drivers, shell: Shell, out: &mut dyn Write) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut definition(drivers), "margay", &mut script);
    out.write_all(&script)?;
    Ok(out.flush()?)
}

/// Writes a man page for each command into a folder, which is made if it does not exist.
pub(crate) fn man_pages(drivers: &Drivers, folder: &Path) -> Result<()> {
    let mut command = definition(drivers).disable_help_subcommand(true);
    command.build();
    fs::create_dir_all(folder).and_then(|()| write_pages(command, folder)).map_err(|error| {
        Failure::new(format!("cannot write man pages into {}: {error}", folder.display()))
            .hint("name a folder that can be written to")
    })
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
