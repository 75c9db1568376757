//! The plugins of Calico that Margay's program replaces.

/// One of Calico's two plugins. Margay's program is either of them, by the name under which it is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// `calico-ipam`, which the main plugin calls for addresses.
    Ipam,
    /// `calico`, which a runtime calls to wire a container.
    Main,
}

impl Role {
    /// The name under which it is called, and the name of its file.
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

    /// The folder beside the plugins with the files for going back.
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

    /// The words after "could" in the failure of Margay's plugin on a network that it cannot serve.
    pub(crate) fn would(self) -> &'static str {
        match self {
            Self::Ipam => "give no address",
            Self::Main => "wire no container",
        }
    }
}
