//! Computes SHA-256 digests, and formats bytes as hexadecimal text.

use std::fmt;
use std::io::{self, Write};

use ring::digest::{Context, Digest, SHA256};

/// Computes the SHA-256 digest of bytes that are added in pieces, also through [`Write`].
#[derive(Clone)]
pub(crate) struct Sha256(Context);

impl Sha256 {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the digest of all bytes added until now, as hexadecimal text.
    pub(crate) fn hex(&self) -> String {
        hex(self.digest())
    }

    fn digest(&self) -> Digest {
        self.0.clone().finish()
    }
}

impl Default for Sha256 {
    fn default() -> Self {
        Self(Context::new(&SHA256))
    }
}

impl PartialEq for Sha256 {
    fn eq(&self, other: &Self) -> bool {
        self.digest().as_ref() == other.digest().as_ref()
    }
}

impl fmt::Debug for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Sha256").field(&self.hex()).finish()
    }
}

impl Write for Sha256 {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Formats bytes as lower-case hexadecimal text.
pub(crate) fn hex(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_matches_fips_180() {
        let mut sum = Sha256::default();
        sum.update(b"a");
        sum.write_all(b"bc").unwrap();
        assert_eq!(sum.hex(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }
}
