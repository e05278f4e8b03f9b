// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"

	"github.com/weir-project/weir/internal/secret"
)

// readKey reads a session's key as two little-endian words, as SipHash defines them. Only the owner may have access
// to the file.
func readKey(path string) (key [2]uint64, err error) {
	text, err := secret.Read(path, 128, "16 bytes, or 32 hexadecimal digits")
	if err != nil {
		return key, fmt.Errorf("key_file: %w", err)
	}
	raw := text
	if len(text) != 16 {
		raw, err = hex.DecodeString(string(bytes.TrimSpace(text)))
		if err != nil || len(raw) != 16 {
			return key, fmt.Errorf("key_file: %s holds neither 16 bytes nor 32 hexadecimal digits", path)
		}
	}
	return [2]uint64{binary.LittleEndian.Uint64(raw), binary.LittleEndian.Uint64(raw[8:])}, nil
}
