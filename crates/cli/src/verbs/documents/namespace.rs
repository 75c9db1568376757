//! The namespaces that a command names. Kinds without namespaces ignore them.

use ipam_operator::documents::{DEFAULT_NAMESPACE, DocumentKind, Manifest, Namespaces};

use super::args::{Delete, Get};
use crate::error::{Failure, Result};
use crate::output::printable;

/// The meaning of `--namespace` and `--all-namespaces`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked<'a> {
    /// Neither is given.
    Default,
    /// One namespace.
    One(&'a str),
    /// All namespaces.
    All,
}

impl<'a> Asked<'a> {
    /// The meaning of the options of `get`.
    ///
    /// # Errors
    /// Both options are given, and the kind has namespaces.
    pub(super) fn by_get(get: &'a Get) -> Result<Self> {
        let is_namespaced = get.which.kind.is_some_and(DocumentKind::is_namespaced);
        match &get.namespace {
            Some(_) if get.all_namespaces && is_namespaced => {
                Err(Failure::new("cannot use both --namespace and --all-namespaces flags at the same time")
                    .hint("give one of them"))
            }
            _ if get.all_namespaces => Ok(Self::All),
            namespace => Ok(Self::by(namespace.as_deref())),
        }
    }

    /// The meaning of the option of `delete`.
    pub(super) fn by_delete(delete: &'a Delete) -> Self {
        Self::by(delete.namespace.as_deref())
    }

    fn by(namespace: Option<&'a str>) -> Self {
        namespace.map_or(Self::Default, Self::One)
    }

    /// True if an option was given.
    pub(super) fn is_explicit(&self) -> bool {
        *self != Self::Default
    }

    /// The namespaces to list.
    pub(super) fn listed(&self) -> Namespaces {
        match self {
            Self::All => Namespaces::All,
            Self::One(namespace) => Namespaces::One((*namespace).to_owned()),
            Self::Default => Namespaces::One(DEFAULT_NAMESPACE.to_owned()),
        }
    }

    /// The document of this name.
    ///
    /// # Errors
    /// All namespaces are requested, and a name alone does not identify the document.
    pub(super) fn named(&self, kind: DocumentKind, name: &str) -> Result<Manifest> {
        match self {
            Self::All if kind.is_namespaced() => Err(single()),
            Self::One(namespace) => Ok(Manifest::named(kind, kind.full_name(namespace, name))),
            Self::All | Self::Default => Ok(Manifest::named(kind, kind.full_name(DEFAULT_NAMESPACE, name))),
        }
    }

    /// The document that a file names.
    ///
    /// # Errors
    /// The error of [`named`](Self::named); the file names another namespace.
    pub(super) fn of_file(&self, manifest: Manifest) -> Result<Manifest> {
        match self {
            Self::All if manifest.kind().is_namespaced() => Err(single()),
            Self::One(namespace) => manifest.within(namespace).map_err(|error| {
                Failure::new(printable(&error.to_string())).hint("leave --namespace away: the document has one")
            }),
            Self::All | Self::Default => Ok(manifest),
        }
    }
}

fn single() -> Failure {
    Failure::new("cannot use --all-namespace flag for getting a single resource")
        .hint("say in which namespace it is: -n NAMESPACE")
}
