//! Tests that the encoding of rows never changes and that damaged rows are detected.

use super::*;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

const PLACE: LogPosition = LogPosition { revision: 0x1234_5678, sub: 300 };
const POINTER: Pointer = Pointer { create_revision: 2, version: 251, place: PLACE, len: 65_536, lease: None };

/// Stores on users' disks contain exactly these bytes, so changing the encoding of rows requires a new store format.
#[test]
fn rows_encoding_never_changes() {
    assert_eq!(hex(&current_key(b"k\0")), "636b00");
    assert_eq!(hex(&log_key(PLACE)), "6c00000000123456780000012c");
    assert_eq!(hex(&value_key(PLACE, 7)), "7600000000123456780000012c00000007");
    assert_eq!(hex(&encode_format(1)), "00000001130d413f");
    assert_eq!(hex(&encode_id(Uuid::from_u128(0x1122_3344))), "01cf3c21dd00000000000000000000000011223344");
    assert_eq!(hex(&encode(b"ck", &POINTER).unwrap()), "01b7454b4602fbfb00fc78563412fb2c01fc00000100");
    let put = LogRow { key: b"k".to_vec(), time: 1_767_225_600_000_000, change: Change::Put(POINTER), prev: None };
    assert_eq!(
        hex(&encode(&log_key(PLACE), &put).unwrap()),
        "0178046fce016bfd00402046484706000002fbfb00fc78563412fb2c01fc0000010000"
    );
    let delete = LogRow { change: Change::Delete, prev: Some(POINTER), ..put };
    assert_eq!(
        hex(&encode(&log_key(PLACE), &delete).unwrap()),
        "01fc3615dc016bfd0040204648470600010102fbfb00fc78563412fb2c01fc00000100"
    );
    let state = StateRow {
        revision: 70_000,
        compacted: 3,
        swept: PLACE,
        log_bytes: 1 << 33,
        time: 1_767_225_600_000_000,
        live: 12,
        digest: u64::MAX,
        ..StateRow::NEW
    };
    assert_eq!(
        hex(&encode(STATE_KEY, &state).unwrap()),
        "0141caf11cfc7011010003fc78563412fb2c01fd0000000002000000fd00402046484706000cfdffffffffffffffff"
    );
    let rows: Vec<_> = value_rows(PLACE, b"value").collect();
    assert_eq!(rows.len(), 1);
    assert_eq!(hex(&rows[0].1), "01ed551eff76616c7565");
    assert_eq!(CHUNK_BYTES, 6139);
    assert_eq!(format!("{:016x}", fingerprint(b"k", PLACE)), "5c85e43475ed148a");
}

/// Changing the encoding of rows with leases, which format 2 introduced, requires a new store format.
#[test]
fn rows_with_leases_encoding_never_changes() {
    let lease = LeaseId::new(0x1234_5678_9abc).unwrap();
    assert_eq!(hex(&lease_key(lease)), "650000123456789abc");
    assert_eq!(hex(&leased_key(lease, b"k")), "6b0000123456789abc6b");
    assert_eq!(hex(&leased_key(LeaseId::new(-1).unwrap(), b"")), "6bffffffffffffffff");
    assert_eq!(lease_and_key(&leased_key(lease, b"k")).unwrap(), (lease, &b"k"[..]));
    assert!(lease_and_key(b"k1234567").is_err() && lease_and_key(&[b'k'; 0]).is_err());
    assert!(lease_and_key(b"e\0\0\0\0\0\0\0\0").is_err(), "0 is no lease");
    let leased = Pointer { lease: Some(lease), ..POINTER };
    let put = LogRow { key: b"k".to_vec(), time: 7, change: Change::Put(leased), prev: None };
    let kept = StoredRetention { revisions: Some(10_000), age: None, bytes: Some(1 << 26), min_age: Some(7) };
    let rows = [
        encode(b"e", &LeaseRow { ttl: 90 }).unwrap(),
        encode(b"ck", &leased).unwrap(),
        encode(b"l", &put).unwrap(),
        encode(b"l", &LogRow { change: Change::Delete, prev: Some(leased), ..put }).unwrap(),
        encode(STATE_KEY, &StateRow { revision: 70_000, client_mark: 3, other_changes: 4, ..StateRow::NEW }).unwrap(),
        encode(RETENTION_KEY, &kept).unwrap(),
    ];
    let spelled = [
        "01d2ed35f75a",
        "026612646d02fbfb00fc78563412fb2c01fc00000100fd7835f1ac68240000",
        "02780fcd8e016b070002fbfb00fc78563412fb2c01fc0000010000fd7835f1ac6824000000",
        "0284d13df7016b07010102fbfb00fc78563412fb2c01fc0000010000fd7835f1ac68240000",
        "02c03eceadfc70110100000200000000000304",
        "014920bcb801fb10270001fc000000040107",
    ];
    assert_eq!(rows.each_ref().map(|row| hex(row)), spelled.map(str::to_owned));
    assert_eq!(decode::<Pointer>(b"ck", &rows[1]).unwrap(), leased);
    assert_eq!(decode::<LogRow>(b"l", &rows[2]).unwrap().put(), Some(&leased));
    assert_eq!(decode::<LogRow>(b"l", &rows[3]).unwrap().prev, Some(leased));
    assert_eq!(decode::<StateRow>(STATE_KEY, &rows[4]).unwrap().other_changes, 4);
    assert_eq!(decode::<StoredRetention>(RETENTION_KEY, &rows[5]).unwrap(), kept);
}

#[test]
fn rows_are_decoded_as_encoded() {
    let row = encode(b"ck", &POINTER).unwrap();
    assert_eq!(decode::<Pointer>(b"ck", &row).unwrap(), POINTER);
    assert!(decode::<Pointer>(b"cl", &row).is_err(), "a row belongs to its key");
    assert!(decode::<StateRow>(b"ck", &row).is_err(), "and is of its kind");
    assert_eq!(decode_format(&encode_format(9)).unwrap(), 9);
    let id = Uuid::new_v4();
    assert_eq!(decode_id(&encode_id(id)).unwrap(), id);
    assert_eq!(log_place(&log_key(PLACE)).unwrap(), PLACE);
    assert!(log_place(&log_key(PLACE)[..12]).is_err());
    assert!(log_place(&value_key(PLACE, 0)).is_err());
    let mut newer = row;
    newer[0] = 3;
    assert!(decode::<Pointer>(b"ck", &newer).unwrap_err().0.contains("unknown version 3"));
}

/// Checks rows with impossible numbers but a correct checksum: such a row was manipulated, or damaged in a very
/// unlikely way.
#[test]
fn rows_are_damaged_when_numbers_are_impossible() {
    fn refused<T: Row>(what: &T) {
        let row = encode(b"k", what).unwrap();
        assert_eq!(decode::<T>(b"k", &row).err(), Some(Damage::row(b"k", "has numbers that cannot be")));
    }
    let far = LogPosition { revision: u64::MAX, sub: 0 };
    refused(&Pointer { len: u32::MAX, ..POINTER });
    refused(&Pointer { version: u64::MAX, ..POINTER });
    refused(&Pointer { place: far, ..POINTER });
    refused(&Pointer { place: LogPosition { sub: u32::MAX, ..PLACE }, ..POINTER });
    let log = LogRow { key: Vec::new(), time: 0, change: Change::Delete, prev: None };
    refused(&LogRow { prev: Some(Pointer { len: u32::MAX, ..POINTER }), ..log.clone() });
    refused(&LogRow { change: Change::Put(Pointer { create_revision: u64::MAX, ..POINTER }), ..log });
    refused(&StateRow { revision: u64::MAX, ..StateRow::NEW });
    refused(&StateRow { compacted: 2, ..StateRow::NEW });
    refused(&StateRow { swept: far, ..StateRow::NEW });
    refused(&StateRow { log_bytes: u64::MAX, ..StateRow::NEW });
}

#[test]
fn rows_have_room_for_longest_key() {
    let row = LogRow {
        key: vec![b'k'; kv::MAX_KEY_BYTES],
        time: u64::MAX,
        change: Change::Put(POINTER),
        prev: Some(POINTER),
    };
    let key = log_key(PLACE);
    let bytes = encode(&key, &row).unwrap();
    assert!(bytes.len() <= MAX_ROW_BYTES);
    assert_eq!(decode::<LogRow>(&key, &bytes).unwrap(), row);
}

#[test]
fn rows_cut_large_values() {
    for len in [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES] {
        let rows: Vec<_> = value_rows(PLACE, &vec![7; len]).collect();
        let pointer = Pointer { len: u32::try_from(len).unwrap(), ..POINTER };
        assert_eq!(rows.len(), pointer.chunks() as usize, "{len}");
        assert!(rows.iter().all(|(_, row)| row.len() <= MAX_ROW_BYTES));
    }
}
