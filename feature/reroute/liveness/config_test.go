// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func valid() Session {
	return Session{Name: "a", ID: 1, Mode: Active, Device: "eth0", Peer: functionB, Via: netip.MustParseAddr("fe80::1"),
		Source: netip.MustParseAddr("2001:db8::1"), Function: functionA, Interval: 10 * time.Millisecond, Multiplier: 3, KeyFile: "/k"}
}

// Errors carry their position and a remedy.
func TestValidate(t *testing.T) {
	if errs := (Config{Sessions: []Session{valid()}}).Validate(); len(errs) != 0 {
		t.Fatal(errs)
	}
	for want, change := range map[string]func(s *Session){
		"name: missing":                              func(s *Session) { s.Name = "" },
		"id: 0 is not allowed":                       func(s *Session) { s.ID = 0 },
		"device: name the interface":                 func(s *Session) { s.Device = "" },
		`mode: "loud": use active`:                   func(s *Session) { s.Mode = "loud" },
		`peer: "fe80::2" is not a global`:            func(s *Session) { s.Peer = netip.MustParseAddr("fe80::2") },
		`source: "invalid IP" is not a global`:       func(s *Session) { s.Source = netip.Addr{} },
		`via: "10.0.0.1" is no IPv6 next hop`:        func(s *Session) { s.Via = netip.MustParseAddr("10.0.0.1") },
		`via: "fe80::1%eth0" is no IPv6 next hop`:    func(s *Session) { s.Via = netip.MustParseAddr("fe80::1%eth0") },
		"is the peer's segment too":                  func(s *Session) { s.Function = s.Peer },
		"is this router's own address (source)":      func(s *Session) { s.Via = s.Source },
		`function: "::1" is not a global`:            func(s *Session) { s.Function = netip.IPv6Loopback() },
		"interval: 500µs: use 1ms to 1m0s":           func(s *Session) { s.Interval = 500 * time.Microsecond },
		"multiplier: 2: use 3 to 50":                 func(s *Session) { s.Multiplier = 2 },
		"grace: 2m0s: use up to 1m0s":                func(s *Session) { s.Grace = 2 * time.Minute },
		"stable_max: 1s is less than stable_for":     func(s *Session) { s.StableFor, s.StableMax = time.Minute, time.Second },
		"key_file: probes are signed: make a key":    func(s *Session) { s.KeyFile = "" },
		`session "a" (number 1): id: 0 is not allow`: func(s *Session) { s.ID = 0 },
	} {
		s := valid()
		change(&s)
		errs := (Config{Sessions: []Session{s}}).Validate()
		if len(errs) == 0 || !strings.Contains(errors.Join(errs...).Error(), want) {
			t.Errorf("%v, want %q", errs, want)
		}
	}
	same := valid()
	errs := (Config{Sessions: []Session{valid(), same}}).Validate()
	text := errors.Join(errs...).Error()
	for _, want := range []string{"another session has this name", `session "a" has 1 too`, "judges device eth0 already: set observe: true"} {
		if !strings.Contains(text, want) {
			t.Errorf("%s, want %q", text, want)
		}
	}
	other := valid()
	other.Name, other.ID, other.Observe = "b", 2, true
	if errs := (Config{Sessions: []Session{valid(), other}}).Validate(); len(errs) != 0 {
		t.Error(errs)
	}
}

// A key is 16 bytes readable by its owner only.
func TestKey(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	write := func(text string, mode os.FileMode) {
		t.Helper()
		os.Remove(path)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	write("\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f", 0o600)
	raw, err := readKey(path)
	if err != nil {
		t.Fatal(err)
	}
	write("000102030405060708090a0b0c0d0e0f\n", 0o400)
	if text, err := readKey(path); err != nil || text != raw || raw[0] != 0x0706050403020100 {
		t.Errorf("%x, %v; want %x", text, err, raw)
	}
	for want, c := range map[string]struct {
		text string
		mode os.FileMode
	}{
		"chmod 600":                     {"000102030405060708090a0b0c0d0e0f", 0o640},
		"neither 16 bytes":              {"0001", 0o600},
		"holds neither 16 bytes nor 32": {"this is not a key at all", 0o600},
		"is no key: 16 bytes":           {strings.Repeat("0", 200), 0o600},
	} {
		write(c.text, c.mode)
		if _, err := readKey(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", c.text, err, want)
		}
	}
	if _, err := readKey(path + "x"); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}
