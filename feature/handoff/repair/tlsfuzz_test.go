// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"testing"
)

// FuzzTLS parses kTLS keys, which come from another host, under a valid checksum. The parser rejects them, or they
// encode to the same bytes and are possible kernel states.
func FuzzTLS(f *testing.F) {
	const head = 5 // section header: number and length
	for _, change := range []func(k *TLS){func(*TLS) {}, func(k *TLS) { k.Rx = nil; k.NoPad = false }, func(k *TLS) { k.Tx = nil; k.ZeroCopy, k.MaxPayload = false, 0 }} {
		s := exampleTLS()
		change(s.TLS)
		f.Add([]byte("state"), s.appendTLS(nil, 0)[head:])
	}
	f.Add([]byte{}, []byte{0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8})
	f.Add([]byte{}, []byte{15, 0, 3, 4, 0, 51, 255, 255, 1, 2, 3, 4, 5, 6, 7, 8})
	f.Fuzz(func(t *testing.T, before, section []byte) {
		if len(section) >= tlsSumLen { // a valid checksum, to reach the parser behind it
			whole := append(bytes.Clone(before), section[:len(section)-tlsSumLen]...)
			sum := sha256.Sum256(whole)
			section = append(bytes.Clone(section[:len(section)-tlsSumLen]), sum[:tlsSumLen]...)
			before = append(whole, sum[:tlsSumLen]...)
		}
		s := &State{}
		if err := s.parseTLS(section, before); err != nil {
			if !errors.Is(err, errFormat) && !errors.Is(err, errVersion) {
				t.Errorf("%v: want a format or a version", err)
			}
			return
		}
		if problem := s.TLS.problem(); problem != "" {
			return // the state's check rejects it
		}
		again := s.appendTLS(nil, 0)
		if got, want := again[len(again)-len(section):len(again)-tlsSumLen], section[:len(section)-tlsSumLen]; !bytes.Equal(got, want) {
			t.Errorf("%x became %x", want, got)
		}
	})
}
