//! Generates pseudorandom numbers that are reproducible from a seed.

/// A stream of pseudorandom numbers (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Returns the stream of numbers for a seed and a round of a test, so that each round can be repeated alone.
    pub fn new(seed: u64, round: u64) -> Self {
        let mut random = Self(seed);
        let start = random.next().wrapping_add(round);
        Self(start)
    }

    #[allow(clippy::should_implement_trait, reason = "the stream never ends, so it is no Iterator")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Draws a random number less than `end`. Panics if the bound `end` is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Draws one of the given values at random.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        let index = self.below(from.len() as u64);
        &from[usize::try_from(index).unwrap()]
    }

    /// Returns true once in `n` calls on average.
    pub fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// Reads a number from an environment variable, for example a seed or a number of rounds.
pub fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|error| panic!("{name}: {error}")))
}
