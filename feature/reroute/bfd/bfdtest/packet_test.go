// SPDX-License-Identifier: Apache-2.0

package bfdtest

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
)

func example() Packet {
	return Packet{State: bfd.Up, Diag: bfd.TimeExpired, Poll: true, Independent: true, Multiplier: 3, Mine: 0x11223344, Yours: 0x55667788,
		DesiredTx: 10 * time.Millisecond, RequiredRx: 300 * time.Millisecond, EchoRx: 50 * time.Millisecond}
}

func TestPacketOnTheWire(t *testing.T) {
	p := example()
	// RFC 5880 section 4.1: version 1 and diagnostic 1; state 3, P and C; multiplier; length; discriminators; 10,000,
	// 300,000 and 50,000 µs.
	const want = "21" + "e8" + "03" + "18" + "11223344" + "55667788" + "00002710" + "000493e0" + "0000c350"
	b := p.Append(nil)
	if got := hex.EncodeToString(b); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if got, err := Parse(append(b, "padding"...)); err != nil || got != p {
		t.Errorf("read back %+v, %v", got, err)
	}
}

func TestPacketErrors(t *testing.T) {
	p := example()
	good := p.Append(nil)
	for want, change := range map[string]func(b []byte) []byte{
		"23 bytes":                 func(b []byte) []byte { return b[:23] },
		"version 2":                func(b []byte) []byte { b[0] = 2<<5 | 1; return b },
		"25 bytes; 24 have come":   func(b []byte) []byte { b[3] = 25; return b },
		"26 is the least":          func(b []byte) []byte { b[1] |= authBit; return b },
		"without authentication":   func(b []byte) []byte { b[3] = 26; return append(b, 0, 0) },
		"multiplier 0":             func(b []byte) []byte { b[2] = 0; return b },
		"multipoint":               func(b []byte) []byte { b[1] |= multipointBit; return b },
		"sender's discriminator":   func(b []byte) []byte { copy(b[4:8], make([]byte, 4)); return b },
		"your discriminator is 0":  func(b []byte) []byte { copy(b[8:12], make([]byte, 4)); return b },
		"poll and final":           func(b []byte) []byte { b[1] |= finalBit; return b },
		"authentication type 1":    func(b []byte) []byte { b[1] |= authBit; b[3] = 27; return append(b, 1, 3, 7) },
		"9 by its own length":      func(b []byte) []byte { b[1] |= authBit; b[3] = 27; return append(b, 4, 9, 7) },
		"want 28":                  func(b []byte) []byte { b[1] |= authBit; b[3] = 27; return append(b, 5, 28, 7) },
		"3 bytes of keyed sha1":    func(b []byte) []byte { b[1] |= authBit; b[3] = 27; return append(b, 4, 28, 7) },
		"want 24 at least":         func([]byte) []byte { return nil },
		"state init":               func(b []byte) []byte { b[1] = byte(bfd.Init) << 6; copy(b[8:12], make([]byte, 4)); return b },
		"is 0 in state up":         func(b []byte) []byte { b[1] = byte(bfd.Up) << 6; copy(b[8:12], make([]byte, 4)); return b },
		"its length says 23 bytes": func(b []byte) []byte { b[3] = 23; return b },
	} {
		if _, err := Parse(change(bytes.Clone(good))); !errors.Is(err, errPacket) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func TestAuthentication(t *testing.T) {
	for _, kind := range []bfd.AuthType{bfd.KeyedSHA1, bfd.MeticulousSHA1} {
		k := bfd.Key{Type: kind, ID: 9, Secret: []byte("a secret")}
		sealed := func(seq uint32) ([]byte, Packet) {
			p := example()
			p.Auth = &Auth{Type: kind, KeyID: 9, Sequence: seq}
			b := p.Append(nil)
			Seal(&k, b)
			p, err := Parse(b)
			if err != nil {
				t.Fatal(err)
			}
			return b, p
		}
		b, p := sealed(1000)
		if len(b) != 52 {
			t.Errorf("%d bytes", len(b))
		}
		for _, c := range []struct {
			last  uint32
			known bool
			ok    bool
		}{{0, false, true}, {999, true, true}, {991, true, true}, {990, true, false}, {1000, true, kind == bfd.KeyedSHA1}, {1001, true, false}, {1 << 31, true, false}} {
			if err := Check(&k, b, &p, c.last, c.known, 9); errors.Is(err, errAuth) == c.ok || c.ok && err != nil {
				t.Errorf("%s, sequence number 1000 after %d: %v", kind, c.last, err)
			}
		}
		for at := range b { // any changed byte
			forged := bytes.Clone(b)
			forged[at] ^= 0x40
			if p, err := Parse(forged); err == nil && Check(&k, forged, &p, 999, true, 9) == nil {
				t.Errorf("byte %d of it may be another", at)
			}
		}
		other := bfd.Key{Type: kind, ID: 9, Secret: []byte("another secret")}
		if Check(&other, b, &p, 0, false, 9) == nil {
			t.Error("another's key will do")
		}
		plain := example()
		if err := Check(&k, plain.Append(nil), &plain, 0, false, 9); !errors.Is(err, errAuth) {
			t.Errorf("without authentication: %v", err)
		}
	}
	if (&bfd.Key{Type: bfd.KeyedSHA1, Secret: make([]byte, 21)}).Validate() == nil || (&bfd.Key{Type: 1, Secret: []byte("x")}).Validate() == nil || (&bfd.Key{Type: bfd.KeyedSHA1}).Validate() == nil {
		t.Error("a key that is none is valid")
	}
}

func FuzzParse(f *testing.F) {
	p := example()
	f.Add(p.Append(nil))
	p.Auth = &Auth{Type: bfd.KeyedSHA1, KeyID: 1, Sequence: 7}
	f.Add(p.Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := Parse(b)
		if err != nil {
			return
		}
		again, err := Parse(p.Append(nil))
		if err != nil {
			t.Fatal(err)
		}
		if (p.Auth == nil) != (again.Auth == nil) || p.Auth != nil && *p.Auth != *again.Auth {
			t.Fatalf("%+v, read back %+v", p.Auth, again.Auth)
		}
		if p.Auth, again.Auth = nil, nil; p != again {
			t.Fatalf("%+v, read back %+v", p, again)
		}
	})
}

// States and diagnostics survive JSON, used by readers without access to the pins.
func TestTexts(t *testing.T) {
	for i := range 32 {
		was := struct {
			State bfd.State
			Diag  bfd.Diag
		}{bfd.State(i & 3), bfd.Diag(i)}
		text, err := json.Marshal(was)
		got := was
		got.State, got.Diag = 99, 99
		if err = errors.Join(err, json.Unmarshal(text, &got)); err != nil || got != was {
			t.Errorf("%+v is %s, which is %+v, %v", was, text, got, err)
		}
	}
	var s bfd.State
	var d bfd.Diag
	if s.UnmarshalText([]byte("upp")) == nil || d.UnmarshalText([]byte("nonsense")) == nil {
		t.Error("what is none was taken for one")
	}
}
