//! The plugins of Calico's that Margay's program stands in for.

/// One of the two plugins of Calico's. Margay's program is either, by the name that it is called by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// `calico-ipam`, which the main plugin calls for addresses.
    Ipam,
    /// `calico`, which a runtime calls to wire a container.
    Main,
}

impl Role {
    /// The name that it is called by, and the name of its file.
    pub(crate) fn program(self) -> &'static str {
        match self {
            Self::Ipam => "calico-ipam",
            Self::Main => "calico",
        }
    }

    /// The name of Margay's program for itself when it is called by that name.
    pub(crate) fn own_name(self) -> &'static str {
        match self {
            Self::Ipam => "margay-ipam",
            Self::Main => "margay-cni",
        }
    }

    /// The folder beside the plugins that has what is needed to go back.
    pub(crate) fn kept(self) -> &'static str {
        match self {
            Self::Ipam => ".margay",
            Self::Main => ".margay-main",
        }
    }

    /// The command that puts Margay's program in its place.
    pub(crate) fn install(self) -> &'static str {
        match self {
            Self::Ipam => "margay install --beside-calico",
            Self::Main => "margay install --beside-calico --main-plugin",
        }
    }

    /// The command that goes back.
    pub(crate) fn undo(self) -> &'static str {
        match self {
            Self::Ipam => "margay install --undo",
            Self::Main => "margay install --undo --main-plugin",
        }
    }

    /// The failure of Margay's plugin on a network that it is of no use with, as it goes on after "could".
    pub(crate) fn would(self) -> &'static str {
        match self {
            Self::Ipam => "give no address",
            Self::Main => "wire no container",
        }
    }
}
