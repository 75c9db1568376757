#![no_main]

libfuzzer_sys::fuzz_target!(
    init: fuzz_bodies::quiet_engines(),
    |data: &[u8]| fuzz_bodies::damaged_file(data)
);
