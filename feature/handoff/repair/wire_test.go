// SPDX-License-Identifier: Apache-2.0

package repair

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"net/netip"
	"os"
	"reflect"
	"strings"
	"testing"
)

// example returns a state with a distinct value in every field.
func example() *State {
	return &State{Local: netip.MustParseAddrPort("[fe80::1]:9000"), Remote: netip.MustParseAddrPort("[fe80::2]:50123"), Zone: "eth0", Device: "eth1",
		MSS: 1440, Timestamps: true, Microseconds: true, SACK: true, Scaling: true, SndScale: 7, RcvScale: 14,
		Timestamp: 0x01020304, SndUna: 0xfffffffe, RcvNxt: 0x80000001,
		Window: Window{SndWl1: 0x80000000, SndWnd: 1000, MaxWindow: 2000, RcvWnd: 3000, RcvWup: 0x7fffffff},
		Send:   []byte("unacknowledged"), Unsent: 4, Unread: []byte("unread"), EOF: true, Fin: true,
		Congestion: "cubic", Linger: -1, ReuseAddr: true, SndBuf: 4096, RcvBuf: 8192, SndBufLocked: true, RcvBufLocked: true,
		Options: []Option{{6, 77}, {18, 1}, {200, 0xffffffff}}}
}

func marshal(t testing.TB, s *State) []byte {
	t.Helper()
	b, err := s.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestWireRoundTrip(t *testing.T) {
	four, mapped := example(), example()
	four.Local, four.Remote = netip.MustParseAddrPort("10.0.0.1:1"), netip.MustParseAddrPort("10.0.0.2:65535")
	mapped.Local, mapped.Remote = netip.MustParseAddrPort("[::ffff:10.0.0.1]:1"), netip.MustParseAddrPort("[::ffff:10.0.0.2]:2")
	plain := &State{Local: four.Local, Remote: four.Remote, MSS: 536, Linger: 7}
	for _, want := range []*State{example(), four, mapped, plain} {
		var got State
		b := marshal(t, want)
		if err := got.UnmarshalBinary(b); err != nil {
			t.Fatal(err)
		}
		got.Send, got.Unread = append([]byte(nil), got.Send...), append([]byte(nil), got.Unread...)
		if !reflect.DeepEqual(&got, want) {
			t.Errorf("got  %+v\nwant %+v", &got, want)
		}
		for n := range b { // every truncation is detected, except of whole sections at the end
			if s, err := Parse(b[:n]); err == nil && len(s.Send)+len(s.Unread) >= len(want.Send)+len(want.Unread) && len(want.Unread) > 0 {
				t.Errorf("%d bytes of %d are taken for the whole", n, len(b))
			}
		}
	}
}

// TestWireGolden compares with a file that never changes, because the format is a protocol between versions of weir.
func TestWireGolden(t *testing.T) {
	golden, err := os.ReadFile("testdata/state-v1.hex")
	if err != nil {
		t.Fatal(err)
	}
	want, err := hex.DecodeString(strings.Join(strings.Fields(string(golden)), ""))
	if err != nil {
		t.Fatal(err)
	}
	if got := marshal(t, example()); !bytes.Equal(got, want) {
		t.Errorf("the state's form has changed:\n%s", hex.Dump(got))
	}
}

func TestParseRefuses(t *testing.T) {
	good := marshal(t, example())
	edit := func(f func(b []byte) []byte) []byte { return f(bytes.Clone(good)) }
	set := func(at int, v ...byte) []byte {
		return edit(func(b []byte) []byte { copy(b[at:], v); return b })
	}
	const core = headerLen + sectionLen
	for _, tc := range []struct {
		name string
		b    []byte
		want error
	}{
		{"nothing", nil, errFormat},
		{"no core", good[:headerLen], errFormat},
		{"another magic", set(0, 'X'), errFormat},
		{"a newer version", set(5, 2), errVersion},
		{"an unknown section that must be known", append(bytes.Clone(good), 99, must, 0, 0, 0, 0, 0, 0), errVersion},
		{"a section twice", append(bytes.Clone(good), sectionUnread, must, 0, 0, 0, 0, 0, 0), errFormat},
		{"a section longer than the rest", append(bytes.Clone(good), 99, 0, 0, 0, 0xff, 0xff, 0xff, 0xff), errFormat},
		{"an unknown flag", set(core, 0x80), errVersion},
		{"a scale above 14", set(core+2, 15), errInvalid},
		{"port 0", set(core+36, 0, 0), errInvalid},
		{"no own address", set(core+4, make([]byte, 16)...), errInvalid},
		{"addresses of two families", set(core+4, []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1}...), errInvalid},
		{"no MSS", set(core+40, 0, 0), errInvalid},
		{"more unsent than there is", set(core+76, 0, 0, 1, 0), errInvalid},
		{"less than nothing unsent", set(core+76, 0xff, 0xff, 0xff, 0xff), errInvalid},
		{"a window above the largest", set(core+60, 0, 0, 0xff, 0xff), errInvalid},
		{"a huge buffer", set(core+84, 0xff), errInvalid},
	} {
		if _, err := Parse(tc.b); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", tc.name, err, tc.want)
		}
	}
	if _, err := Parse(append(bytes.Clone(good), 99, 0, 0, 0, 0, 0, 0, 1, 'x')); err != nil {
		t.Errorf("a section that may be unknown: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(marshal(f, example()))
	f.Add(marshal(f, exampleTLS()))
	f.Add(binary.BigEndian.AppendUint16([]byte(wireMagic), wireVersion))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := Parse(b)
		if err != nil {
			return
		}
		again, err := s.MarshalBinary()
		if err != nil {
			t.Fatalf("what was parsed cannot be written: %v", err)
		}
		second, err := Parse(again)
		if err != nil {
			t.Fatalf("what was written cannot be parsed: %v", err)
		}
		if twice := marshal(t, second); !bytes.Equal(twice, again) {
			t.Fatal("a state changes on the way")
		}
	})
}
