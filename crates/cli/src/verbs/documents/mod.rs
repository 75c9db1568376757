//! Shows, writes and deletes documents as calicoctl does. The files are read before the store is opened: a person may
//! type one.

pub(crate) mod args;
mod change;
mod files;
mod get;
mod namespace;
mod table;
mod tally;

use std::time::Duration;

use async_trait::async_trait;
use ipam_operator::Operator;
use ipam_operator::documents::{DocumentKind, Manifest, WriteMode};
use kv::Deadline;

pub(crate) use self::files::values;

use self::args::{Apply, Create, Delete, Get, Replace, Selection};
use self::change::{Deleting, Writing};
use self::files::Depth;
use self::get::Form;
use self::namespace::Asked;
use crate::answer::Answer;
use crate::command::{OnOpenStore, OnStore};
use crate::error::{Failure, Result};
use crate::store::{Need, StoreAt};

/// The longest time for a command once the store is open: a pool's deletion is a commit for each block.
const PATIENCE: Duration = Duration::from_secs(600);

#[async_trait(?Send)]
impl OnStore for Get {
    async fn run(&self, at: StoreAt<'_>) -> Result<Answer> {
        let (which, asked) = (&self.which, Asked::by_get(self)?);
        let what = match which.kind {
            Some(kind) if which.name.is_empty() => Wanted::All(kind),
            kind => {
                let manifests = match kind {
                    None if self.skip_empty => {
                        placed(files::read_any(&which.filename, depth(which.recursive))?, &asked)?
                    }
                    _ => selected(which, &asked)?,
                };
                // calicoctl exports only documents that are named, not those of a file.
                let form = if self.export && kind.is_some() { Form::Export } else { Form::Stored };
                let name = |one: &Manifest| (one.kind(), one.name().to_owned());
                Wanted::Named(manifests.iter().map(name).collect(), form)
            }
        };
        at.carry_out(&Reading { what, asked }).await
    }
}

/// The documents to show.
struct Reading<'a> {
    what: Wanted,
    asked: Asked<'a>,
}

enum Wanted {
    All(DocumentKind),
    Named(Vec<(DocumentKind, String)>, Form),
}

#[async_trait(?Send)]
impl OnOpenStore for Reading<'_> {
    fn need(&self) -> Need {
        Need::Read
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
        match &self.what {
            Wanted::All(kind) => get::all(operator, *kind, &self.asked, deadline).await,
            Wanted::Named(names, form) => get::named(operator, names, *form, &self.asked, deadline).await,
        }
    }
}

#[async_trait(?Send)]
impl OnStore for Create {
    async fn run(&self, at: StoreAt<'_>) -> Result<Answer> {
        let writing = Writing::of(WriteMode::Create, &self.change, at)?;
        at.carry_out(&writing.skipping(self.skip_exists)).await
    }
}

#[async_trait(?Send)]
impl OnStore for Apply {
    async fn run(&self, at: StoreAt<'_>) -> Result<Answer> {
        at.carry_out(&Writing::of(WriteMode::Apply, &self.change, at)?).await
    }
}

#[async_trait(?Send)]
impl OnStore for Replace {
    async fn run(&self, at: StoreAt<'_>) -> Result<Answer> {
        at.carry_out(&Writing::of(WriteMode::Replace, &self.change, at)?).await
    }
}

#[async_trait(?Send)]
impl OnStore for Delete {
    async fn run(&self, at: StoreAt<'_>) -> Result<Answer> {
        if self.which.kind.is_some() && self.which.name.is_empty() {
            return Err(Failure::new("resource name must be specified")
                .hint("name what is to be deleted, such as: margay delete ippool main"));
        }
        let manifests = selected(&self.which, &Asked::by_delete(self))?;
        at.carry_out(&Deleting { args: self, manifests }).await
    }
}

/// The named documents, by kind and name or in files.
fn selected(which: &Selection, asked: &Asked<'_>) -> Result<Vec<Manifest>> {
    match which.kind {
        Some(kind) => which.name.iter().map(|name| asked.named(kind, name)).collect(),
        None => placed(files::read(&which.filename, depth(which.recursive))?, asked),
    }
}

/// The documents that files name, in the requested namespace.
fn placed(manifests: Vec<Manifest>, asked: &Asked<'_>) -> Result<Vec<Manifest>> {
    manifests.into_iter().map(|manifest| asked.of_file(manifest)).collect()
}

fn depth(recursive: bool) -> Depth {
    if recursive { Depth::All } else { Depth::Files }
}
