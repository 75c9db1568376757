//! The outcome for documents, in calicoctl's words.

use ipam_operator::documents::Manifest;
use serde::Serialize;
use serde_json::json;

use crate::answer::Answer;
use crate::error::{Failure, Result};
use crate::output::printable;

/// The verb on the documents.
#[derive(Clone, Copy, Debug)]
pub(super) struct Verb {
    /// The form of the verb in "failed to create".
    pub(super) base: &'static str,
    /// The form of the verb in "created".
    pub(super) past: &'static str,
}

/// A document that was done or failed.
#[derive(Debug, Serialize)]
struct Entry {
    kind: &'static str,
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// The outcome for each document.
#[derive(Debug)]
pub(super) struct Tally {
    verb: Verb,
    /// The kind of all documents, if they have the same.
    kind: Option<&'static str>,
    dry_run: bool,
    done: Vec<Entry>,
    failed: Vec<Entry>,
    advice: Option<String>,
}

impl Tally {
    pub(super) fn new(verb: Verb, manifests: &[Manifest], dry_run: bool) -> Self {
        let kind = manifests.first().map(Manifest::kind);
        let kind = kind.filter(|kind| manifests.iter().all(|other| other.kind() == *kind));
        let kind = kind.map(|kind| kind.as_str());
        Self { verb, kind, dry_run, done: Vec::new(), failed: Vec::new(), advice: None }
    }

    /// Counts a document that was done.
    pub(super) fn done(&mut self, manifest: &Manifest) {
        self.done.push(entry(manifest, None));
    }

    /// Counts a document that failed, and keeps the first advice.
    pub(super) fn failed(&mut self, manifest: &Manifest, error: &ipam_core::Error, advice: Option<String>) {
        self.failed.push(entry(manifest, Some(printable(&error.to_string()))));
        self.advice = self.advice.take().or(advice);
    }

    /// The answer. Errors make it a failure if no document was done, otherwise an incomplete answer.
    pub(super) fn answer(self) -> Result<Answer> {
        let (done, all) = (self.done.len(), self.done.len() + self.failed.len());
        let of_kind = self.kind.map(|kind| format!("'{kind}' ")).unwrap_or_default();
        let past = self.verb.past;
        let text = match (self.dry_run, self.failed.len()) {
            (false, 0) => format!("Successfully {past} {done} {of_kind}resource(s)"),
            (true, 0) => format!("Dry run: would have {past} {done} {of_kind}resource(s)"),
            (false, _) => format!("Partial success: {past} {done} out of {all} {of_kind}resources:"),
            (true, _) => format!("Dry run: would have {past} {done} out of {all} {of_kind}resources:"),
        };
        let json = json!({ past: self.done, "failed": self.failed, "dry_run": self.dry_run });
        match self.failure() {
            Some(failure) if self.done.is_empty() => Err(failure),
            Some(failure) => Ok(Answer::new(text, &json)?.incomplete(failure)),
            None => Answer::new(text, &json),
        }
    }

    fn failure(&self) -> Option<Failure> {
        let errors: Vec<&str> = self.failed.iter().filter_map(|entry| entry.error.as_deref()).collect();
        if errors.is_empty() {
            return None;
        }
        let (base, errors) = (self.verb.base, errors.join(" "));
        let what = match (self.done.is_empty(), self.kind, self.failed.len()) {
            (true, Some(kind), 1) => format!("failed to {base} '{kind}' resource"),
            (true, Some(kind), _) => format!("failed to {base} any '{kind}' resources"),
            (true, None, _) => format!("failed to {base} any resources"),
            (false, ..) => "hit error".to_owned(),
        };
        let failure = Failure::new(format!("{what}: [{errors}]"));
        Some(match &self.advice {
            Some(advice) => failure.hint(advice),
            None => failure,
        })
    }
}

fn entry(manifest: &Manifest, error: Option<String>) -> Entry {
    Entry { kind: manifest.kind().as_str(), name: manifest.name().to_owned(), error }
}

#[cfg(test)]
mod tests {
    use ipam_operator::documents::{DocumentError, DocumentKind};

    use super::*;
    use crate::options::Format;

    const CREATE: Verb = Verb { base: "create", past: "created" };

    fn pool(name: &str) -> Manifest {
        Manifest::named(DocumentKind::Pool, name)
    }

    /// The output on stdout and stderr: the first documents, `done` in number, are done, and the others fail.
    fn said(manifests: &[Manifest], done: usize, dry_run: bool) -> (String, String) {
        let mut tally = Tally::new(CREATE, manifests, dry_run);
        for (at, manifest) in manifests.iter().enumerate() {
            let error = ipam_core::Error::from(DocumentError::Exists(manifest.kind(), manifest.name().to_owned()));
            if at < done { tally.done(manifest) } else { tally.failed(manifest, &error, Some("do".into())) }
        }
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let printed = tally.answer().and_then(|answer| answer.print(Format::Table, &mut out, &mut err));
        if let Err(failure) = printed {
            failure.print(&mut err);
        }
        (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
    }

    #[test]
    fn the_words_are_calicoctls() {
        let two = [pool("a"), pool("b")];
        let mixed = [pool("a"), Manifest::named(DocumentKind::Node, "n")];
        let exists = |name: &str| format!("resource already exists: IPPool({name})");
        for (manifests, done, dry_run, out, err) in [
            (&two[..1], 1, false, "Successfully created 1 'IPPool' resource(s)\n", String::new()),
            (&mixed, 2, false, "Successfully created 2 resource(s)\n", String::new()),
            (&two, 2, true, "Dry run: would have created 2 'IPPool' resource(s)\n", String::new()),
            (
                &two[..1],
                0,
                false,
                "",
                format!("error: failed to create 'IPPool' resource: [{}]\nhint: do\n", exists("a")),
            ),
            (
                &two,
                0,
                false,
                "",
                format!(
                    "error: failed to create any 'IPPool' resources: [{} {}]\nhint: do\n",
                    exists("a"),
                    exists("b")
                ),
            ),
            (
                &two,
                1,
                false,
                "Partial success: created 1 out of 2 'IPPool' resources:\n",
                format!("error: hit error: [{}]\nhint: do\n", exists("b")),
            ),
        ] {
            assert_eq!(said(manifests, done, dry_run), (out.to_owned(), err));
        }
        assert!(
            said(&mixed, 0, false).1.starts_with("error: failed to create any resources: [resource already exists")
        );
    }
}
