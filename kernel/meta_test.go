// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"bytes"
	"errors"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
)

var metas = map[string]Meta{
	"zero": {},
	"full": {ABI: 3, Object: ObjectHash([]byte("elf")), Cookie: 1 << 60, Inode: 4026531840, Created: time.Unix(1700000000, 123),
		Version: "v1.2.3-4-gabcdef", Config: []byte(`{"service":{}}`)},
	"version to the brim": {Version: strings.Repeat("v", 63), Created: time.Unix(0, -1), Config: bytes.Repeat([]byte{0}, 70000)},
}

// normal returns m as read back.
func normal(m Meta) Meta {
	if m.Created.IsZero() {
		m.Created = time.Unix(0, m.Created.UnixNano())
	}
	if m.Config == nil {
		m.Config = []byte{}
	}
	return m
}

func TestMetaRoundTrip(t *testing.T) {
	for name, m := range metas {
		var got Meta
		if err := got.unmarshal(m.marshal()); err != nil {
			t.Errorf("%s: %v", name, err)
		} else if !reflect.DeepEqual(got, normal(m)) {
			t.Errorf("%s: got %+v, want %+v", name, got, m)
		}
	}
	long := Meta{Version: strings.Repeat("v", 100)}
	var got Meta
	if err := got.unmarshal(long.marshal()); err != nil || got.Version != long.Version[:63] {
		t.Errorf("long version: %q, %v", got.Version, err)
	}
}

// The layout is a protocol: this is a version 1 meta, field by field (docs/PINS.md).
func TestMetaLayout(t *testing.T) {
	m := metas["full"]
	b := m.marshal()
	const header = 4*4 + 32 + 32 + 8 + 8 + 8 + 64
	if len(b) != header+len(m.Config) || !bytes.Equal(b[header:], m.Config) {
		t.Fatalf("%d bytes, want %d with the config at the end", len(b), header+len(m.Config))
	}
	hash := m.ConfigHash()
	for at, want := range map[int][]byte{
		0:  {0x77, 0x65, 0x69, 0x72, 1, 0, 0, 0, 3, 0, 0, 0, byte(len(m.Config))}, // in this machine's byte order
		16: m.Object[:],
		48: hash[:],
		80: {0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0xf0},
		96: {0x7b, 0x00},
	} {
		if at == 0 && b[0] != 'w' {
			t.Log("big-endian: numbers not compared")
			break
		}
		if at != 96 && !bytes.Equal(b[at:at+len(want)], want) {
			t.Errorf("at byte %d: % x, want % x", at, b[at:at+len(want)], want)
		}
	}
	if v := string(bytes.TrimRight(b[104:168], "\x00")); v != m.Version {
		t.Errorf("version %q", v)
	}
}

// Pins of another ABI are rejected with their creator and the remedy.
func TestRequireABI(t *testing.T) {
	m := Meta{ABI: 2, Version: "v9.9.9"}
	if err := m.RequireABI(instance, 2); err != nil {
		t.Error(err)
	}
	for _, known := range []uint32{1, 3} {
		err := m.RequireABI(instance, known)
		if !errors.Is(err, ErrABI) || !strings.Contains(err.Error(), "host/test/one has ABI 2, made by weir v9.9.9") || !strings.Contains(err.Error(), "remove it with that version first") {
			t.Errorf("known %d: %v", known, err)
		}
	}
}

func TestMetaDamaged(t *testing.T) {
	good := metas["full"].marshal()
	for n := range good {
		if err := new(Meta).unmarshal(good[:n]); !errors.Is(err, ErrABI) {
			t.Errorf("cut to %d bytes: %v", n, err)
		}
	}
	flip := func(at int) []byte {
		b := bytes.Clone(good)
		b[at] ^= 0x40
		return b
	}
	for name, c := range map[string]struct {
		b    []byte
		want string
	}{
		"mark":        {flip(0), "has no magic number of weir"},
		"layout":      {flip(4), "this weir supports layout 1: use the version that made them"},
		"length":      {flip(15), "bytes of config and has"},
		"config hash": {flip(48), "does not match its hash"},
		"config":      {flip(len(good) - 1), "does not match its hash"},
	} {
		if err := new(Meta).unmarshal(c.b); !errors.Is(err, ErrABI) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want one that says %q", name, err, c.want)
		}
	}
}

// Readers and writers reject pins of another layout and foreign pins.
func TestOpenForeignMeta(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	defer l.Unlock()
	for name, change := range map[string]func(b []byte){
		"other layout": func(b []byte) { b[4], b[7] = b[4]^2, b[7]^2 },
		"not weir's":   func(b []byte) { b[0] ^= 1 },
	} {
		if err := publish(l, instance, 1); err != nil {
			t.Fatal(err)
		}
		m, err := ebpf.LoadPinnedMap(filepath.Join(r.dir(instance), metaPin), nil)
		if err != nil {
			t.Fatal(err)
		}
		b, err := m.LookupBytes(uint32(0))
		if err != nil {
			t.Fatal(err)
		}
		change(b)
		if err := m.Put(uint32(0), b); err != nil {
			t.Fatal(err)
		}
		m.Close()
		for _, o := range []opener{r, l} {
			if _, err := o.Open(instance); !errors.Is(err, ErrABI) || !strings.Contains(err.Error(), "host/test/one/meta") {
				t.Errorf("%s: %v, want ErrABI with the path", name, err)
			}
		}
	}
	if err := l.Remove(instance); err != nil {
		t.Errorf("pins of another version cannot be removed: %v", err)
	}
}

func FuzzMeta(f *testing.F) {
	for _, m := range metas {
		if len(m.Config) < 1000 {
			f.Add(m.marshal())
		}
	}
	f.Add([]byte("weir"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var m, again Meta
		if err := m.unmarshal(b); err != nil {
			if !errors.Is(err, ErrABI) {
				t.Errorf("error is not ErrABI: %v", err)
			}
			return
		}
		m.Version = m.Version[:min(len(m.Version), 63)]
		m.Version = strings.TrimRight(m.Version, "\x00")
		if err := again.unmarshal(m.marshal()); err != nil || !reflect.DeepEqual(m, again) {
			t.Errorf("read %+v, written and read again %+v, %v", m, again, err)
		}
	})
}
