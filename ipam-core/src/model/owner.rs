//! Who a block belongs to.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

/// The owner of a block, as the block names it: `host:node1`, `virtual:load-balancer`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Owner {
    /// A node, by its name.
    Host(String),
    /// Not a node: a load balancer, for one.
    Virtual(String),
    /// A text of neither form. Nobody can be this owner, so such a block is only borrowed from.
    Other(String),
}

/// The name of the virtual owner from whose blocks Calico gives addresses to services.
const LOAD_BALANCER: &str = "load-balancer";

impl Owner {
    /// A node.
    pub fn host(name: impl Into<String>) -> Self {
        Self::Host(name.into())
    }

    /// The virtual owner from whose blocks Calico gives addresses to services of the type LoadBalancer.
    pub fn load_balancer() -> Self {
        Self::Virtual(LOAD_BALANCER.to_owned())
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(name) => write!(f, "host:{name}"),
            Self::Virtual(name) => write!(f, "virtual:{name}"),
            Self::Other(text) => f.write_str(text),
        }
    }
}

impl From<&str> for Owner {
    fn from(text: &str) -> Self {
        match text.split_once(':') {
            Some(("host", name)) => Self::Host(name.to_owned()),
            Some(("virtual", name)) => Self::Virtual(name.to_owned()),
            _ => Self::Other(text.to_owned()),
        }
    }
}

impl FromStr for Owner {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(text.into())
    }
}
