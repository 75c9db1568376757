//! `margay export`.

use std::path::{Path, PathBuf};

use async_trait::async_trait;
use clap::Args;
use indicatif::HumanBytes;
use ipam_operator::moving::Tally;
use serde::Serialize;

use crate::answer::Answer;
use crate::command::OnStore;
use crate::error::Result;
use crate::store::StoreAt;
use crate::transfer::{Filter, Overwrite, Writer, Written, aside};

pub(crate) const HELP: &str = "\
Examples:
  margay export /var/backups/ipam.jsonl
  margay export - --store redb:///var/lib/margay/ipam.redb | gzip > ipam.jsonl.gz

Containers can be started and stopped meanwhile. The file has blocks, handles,
affinities, settings, pools, reservations and nodes, as they were at one
revision; of a cluster nothing else, where `margay store backup` writes all
that is Calico's. It is of the same form: `margay store restore` takes it, too.";

#[derive(Debug, Args)]
pub(crate) struct Export {
    /// The file to write, or - for stdout
    pub(crate) file: PathBuf,

    /// Write over a file that is there
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Serialize)]
struct Json {
    file: String,
    revision: i64,
    bytes: u64,
    #[serde(flatten)]
    tally: Tally,
}

#[async_trait(?Send)]
impl OnStore for Export {
    async fn run(&self, at: StoreAt<'_>) -> Result<Answer> {
        let to_stdout = self.file == Path::new("-");
        let (path, overwrite) = (self.file.clone(), if self.force { Overwrite::Allowed } else { Overwrite::Never });
        let writer =
            if to_stdout { Writer::stdout()? } else { aside(move || Writer::create(&path, overwrite)).await? };
        let Written { revision, tally, bytes, .. } = Written::of(at, Filter::Ipam, writer).await?;
        let file = if to_stdout { "stdout".to_owned() } else { self.file.display().to_string() };
        let text =
            format!("Successfully exported {at} at revision {revision} to {file}: {tally}, {}", HumanBytes(bytes));
        let answer = Answer::new(text, &Json { file, revision: revision.get(), bytes, tally })?;
        Ok(if to_stdout { answer.on_stderr() } else { answer })
    }
}
