// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
)

// exampleTLS returns a TLS session with a distinct value in every field.
func exampleTLS() *State {
	s := example()
	s.Send, s.Unsent, s.Unread, s.EOF, s.Fin = nil, 0, nil, false, false
	key := func(first byte) (k Keys) {
		for i := range 56 {
			k = append(k, first+byte(i))
		}
		return k[:8+32+4+8]
	}
	s.TLS = &TLS{Version: tlsVersion13, Cipher: 52, Tx: key(0x40), Rx: key(0xa0), ZeroCopy: true, NoPad: true, MaxPayload: 4096}
	return s
}

func TestTLSWire(t *testing.T) {
	want := exampleTLS()
	onlyTx, none := exampleTLS(), exampleTLS()
	onlyTx.TLS.Rx, onlyTx.TLS.NoPad, onlyTx.Unread = nil, false, []byte("ciphertext")
	none.TLS, none.Send = &TLS{}, []byte("plain")
	for _, want := range []*State{want, onlyTx, none} {
		got, err := Parse(marshal(t, want))
		ok(t, err)
		if got.Unread = append([]byte(nil), got.Unread...); len(got.Send) == 0 {
			got.Send = nil
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got  %+v %+v\nwant %+v %+v", got, got.TLS, want, want.TLS)
		}
	}
	good := marshal(t, want)
	for i := range good {
		b := bytes.Clone(good)
		b[i] ^= 1
		if s, err := Parse(b); err == nil && !reflect.DeepEqual(s.TLS, want.TLS) || err == nil && i >= headerLen+sectionLen && s.TLS != nil {
			t.Errorf("byte %d is another, and nobody sees it", i)
		}
	}
	for n := len(good) - 10; n < len(good); n++ {
		if _, err := Parse(good[:n]); !errors.Is(err, errFormat) {
			t.Errorf("%d bytes of %d: %v", n, len(good), err)
		}
	}
	for name, f := range map[string]func(*State){
		"an unknown cipher":         func(s *State) { s.TLS.Cipher = 99 },
		"data on its way":           func(s *State) { s.Send = []byte("x") },
		"unread records":            func(s *State) { s.Unread = []byte("x") },
		"an end":                    func(s *State) { s.Fin = true },
		"keys of another size":      func(s *State) { s.TLS.Rx = s.TLS.Rx[1:] },
		"an option without keys":    func(s *State) { s.TLS.Rx = nil },
		"a version without keys":    func(s *State) { s.TLS.Tx, s.TLS.Rx = nil, nil },
		"records that are too long": func(s *State) { s.TLS.MaxPayload = maxTLSRecord + 1 },
	} {
		s := exampleTLS()
		f(s)
		if _, err := s.MarshalBinary(); !errors.Is(err, errInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestTLSKeysAreNotPrinted checks that no output contains keys.
func TestTLSKeysAreNotPrinted(t *testing.T) {
	s := exampleTLS()
	j, err := json.Marshal(s)
	ok(t, err)
	s.TLS.Cipher = 99
	_, err = s.MarshalBinary()
	for _, text := range []string{string(j), fmt.Sprint(s), fmt.Sprintf("%+v", *s.TLS), fmt.Sprintf("%#v", *s.TLS), fmt.Sprintf("%x %q %d %s", s.TLS.Tx, s.TLS.Tx, s.TLS.Tx, s.TLS.Rx),
		fmt.Sprint(s.TLS), fmt.Sprintf("%+v", s), err.Error()} {
		for _, trace := range []string{"@AB", "4041", "0x40, 0x41", "64 65", "64, 65", "QEFC"} {
			if strings.Contains(text, trace) {
				t.Errorf("keys are in %q", text)
			}
		}
	}
}
