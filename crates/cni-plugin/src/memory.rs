//! Defines the memory allocator of the statically linked program.
//!
//! musl's own allocator needs many system calls for small allocations. Allocators for servers reserve more memory than
//! a short plugin call ever needs, and reserving it takes a tenth of the call's time. dlmalloc needs few system calls
//! and reserves little memory. When dlmalloc allocates zeroed memory, it zeroes even pages that the kernel has just
//! zeroed. An open sled store allocates 25 MB of zeroed memory, but uses only a small part of it. With dlmalloc alone,
//! a cold ADD on sled took three times as long, with 7,200 page faults instead of 1,100. Large allocations use musl's
//! allocator, which maps fresh zeroed pages without writing to them.
#![expect(
    unsafe_code,
    reason = "the trait of allocators is unsafe; every call goes to one of two allocators unchanged"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr;

use dlmalloc::GlobalDlmalloc;

/// Minimum size, in bytes, of an allocation that uses musl's allocator.
const LARGE_BYTES: usize = 128 << 10;

/// An allocator that uses dlmalloc for small allocations and musl's allocator for large ones. The size of an allocation
/// decides whether dlmalloc or musl's allocator frees the memory.
pub(crate) struct SizedAllocator;

fn is_large(size: usize) -> bool {
    size >= LARGE_BYTES
}

unsafe impl GlobalAlloc for SizedAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match is_large(layout.size()) {
            true => unsafe { System.alloc(layout) },
            false => unsafe { GlobalDlmalloc.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match is_large(layout.size()) {
            true => unsafe { System.alloc_zeroed(layout) },
            false => unsafe { GlobalDlmalloc.alloc_zeroed(layout) },
        }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        match is_large(layout.size()) {
            true => unsafe { System.dealloc(memory, layout) },
            false => unsafe { GlobalDlmalloc.dealloc(memory, layout) },
        }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        match (is_large(layout.size()), is_large(size)) {
            (true, true) => unsafe { System.realloc(memory, layout, size) },
            (false, false) => unsafe { GlobalDlmalloc.realloc(memory, layout, size) },
            // A reallocation across the size limit must copy the content, because one allocator cannot resize the
            // other's memory.
            _ => unsafe {
                let moved = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
                if !moved.is_null() {
                    ptr::copy_nonoverlapping(memory, moved, layout.size().min(size));
                    self.dealloc(memory, layout);
                }
                moved
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(size: usize) -> Layout {
        Layout::from_size_align(size, 8).unwrap()
    }

    #[test]
    fn allocation_keeps_content_when_resized_over_limit() {
        let sizes = [64, LARGE_BYTES - 1, LARGE_BYTES, 4 * LARGE_BYTES, LARGE_BYTES - 8, LARGE_BYTES + 8, 100];
        unsafe {
            let mut memory = SizedAllocator.alloc(layout(sizes[0]));
            (0..64_u8).for_each(|place| memory.add(place.into()).write(place));
            for pair in sizes.windows(2) {
                memory = SizedAllocator.realloc(memory, layout(pair[0]), pair[1]);
                assert!((0..64_u8).all(|place| memory.add(place.into()).read() == place), "{pair:?}");
                // Write to every byte of the reallocated memory, to check that it is usable.
                (64..pair[1]).for_each(|place| memory.add(place).write(0xff));
            }
            SizedAllocator.dealloc(memory, layout(100));
        }
    }

    #[test]
    fn allocation_is_zeroed() {
        for size in [100, LARGE_BYTES - 1, LARGE_BYTES, 8 * LARGE_BYTES] {
            unsafe {
                let used = SizedAllocator.alloc(layout(size));
                used.write_bytes(0xff, size);
                SizedAllocator.dealloc(used, layout(size));
                let memory = SizedAllocator.alloc_zeroed(layout(size));
                assert!((0..size).all(|place| memory.add(place).read() == 0), "{size}");
                SizedAllocator.dealloc(memory, layout(size));
            }
        }
    }
}
