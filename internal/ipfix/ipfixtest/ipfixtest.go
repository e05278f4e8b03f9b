// SPDX-License-Identifier: Apache-2.0

// Package ipfixtest creates messages of IPFIX and NetFlow v9 for tests.
package ipfixtest

import "github.com/weir-project/weir/internal/ipfix"

// Record is template 260 with fields of 4 and 8 bytes. A data record has 12 bytes.
var Record = []byte{1, 4, 0, 2, 0, 8, 0, 4, 0, 1, 0, 8}

// Templates returns template 260 and options template 261.
func Templates(version uint16) []ipfix.Template {
	options := ipfix.Template{ID: 261, Options: true, Record: []byte{1, 5, 0, 2, 0, 1, 0, 149, 0, 4, 0, 41, 0, 8}}
	if version == ipfix.NetFlow9 {
		options.Record = []byte{1, 5, 0, 4, 0, 4, 0, 1, 0, 4, 0, 41, 0, 8}
	}
	return []ipfix.Template{{ID: 260, Record: Record}, options}
}

// Message returns a message of sets. The header of NetFlow v9 counts no records.
func Message(h ipfix.Header, sets ...[]byte) []byte {
	b := ipfix.Encode(h, nil)
	for _, s := range sets {
		b = append(b, s...)
	}
	if h.Version == ipfix.IPFIX {
		b[2], b[3] = byte(len(b)>>8), byte(len(b))
	}
	return b
}

// Set returns a set with its header.
func Set(id uint16, body ...byte) []byte {
	n := 4 + len(body)
	return append([]byte{byte(id >> 8), byte(id), byte(n >> 8), byte(n)}, body...)
}
