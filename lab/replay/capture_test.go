// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
)

// A capture with partial packets is rejected: resent they would be different packets.
func TestLoadCut(t *testing.T) {
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "cut.pcap"))
	if err != nil {
		t.Fatal(err)
	}
	w := pcapgo.NewWriter(f)
	if err := errors.Join(w.WriteFileHeader(60, layers.LinkTypeEthernet),
		w.WritePacket(gopacket.CaptureInfo{Timestamp: time.Now(), CaptureLength: 60, Length: 142}, make([]byte, 60)), f.Close()); err != nil {
		t.Fatal(err)
	}
	if got, err := Load(dir); !errors.Is(err, errCut) {
		t.Errorf("%d devices, %v", len(got), err)
	}
}

func TestRebuild(t *testing.T) {
	seg := func(seq uint32, data string) segment { return segment{seq, []byte(data)} }
	for _, c := range []struct {
		name string
		in   []segment
		want string
		err  error
	}{
		{"in order", []segment{seg(10, "abc"), seg(13, "def")}, "abcdef", nil},
		{"out of order", []segment{seg(13, "def"), seg(10, "abc")}, "abcdef", nil},
		{"sent twice", []segment{seg(10, "abc"), seg(10, "abc"), seg(13, "d")}, "abcd", nil},
		{"repeated in other pieces", []segment{seg(10, "abcd"), seg(12, "cdef")}, "abcdef", nil},
		{"across the end of the numbers", []segment{seg(0xfffffffe, "abcd"), seg(2, "ef")}, "abcdef", nil},
		{"a gap", []segment{seg(10, "abc"), seg(14, "ef")}, "", errGap},
		{"nothing", nil, "", nil},
	} {
		got, err := rebuild(c.in)
		if !errors.Is(err, c.err) || c.err == nil && string(got) != c.want {
			t.Errorf("%s: %q, %v; want %q, %v", c.name, got, err, c.want, c.err)
		}
	}
}
