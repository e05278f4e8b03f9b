// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/feature/filter/pcap"
)

// frame returns an Ethernet frame with UDP over IPv4.
func frame(t *testing.T, port int, size int) []byte {
	t.Helper()
	ip := &layers.IPv4{Version: 4, TTL: 64, Protocol: layers.IPProtocolUDP, SrcIP: []byte{192, 0, 2, 1}, DstIP: []byte{192, 0, 2, 2}}
	udp := &layers.UDP{SrcPort: 1000, DstPort: layers.UDPPort(port)}
	udp.SetNetworkLayerForChecksum(ip)
	b := gopacket.NewSerializeBuffer()
	if err := gopacket.SerializeLayers(b, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true},
		&layers.Ethernet{SrcMAC: make([]byte, 6), DstMAC: make([]byte, 6), EthernetType: layers.EthernetTypeIPv4}, ip, udp, gopacket.Payload(make([]byte, size))); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// captureOf encodes frames as a capture with a format and link type.
func captureOf(t *testing.T, kind string, link layers.LinkType, cut int, prefix []byte, frames ...[]byte) []byte {
	t.Helper()
	var b bytes.Buffer
	var write func(gopacket.CaptureInfo, []byte) error
	flush := func() error { return nil }
	if kind == "pcap" {
		w := pcapgo.NewWriter(&b)
		if err := w.WriteFileHeader(65536, link); err != nil {
			t.Fatal(err)
		}
		write = w.WritePacket
	} else {
		w, err := pcapgo.NewNgWriter(&b, link)
		if err != nil {
			t.Fatal(err)
		}
		write, flush = w.WritePacket, w.Flush
	}
	for i, f := range frames {
		writeOne(t, write, i, append(bytes.Clone(prefix), f[cut:]...))
	}
	if err := flush(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func writeOne(t *testing.T, write func(gopacket.CaptureInfo, []byte) error, i int, data []byte) {
	t.Helper()
	at := time.Unix(1700000000, int64(i)*1e8) // ten a second
	if err := write(gopacket.CaptureInfo{Timestamp: at, CaptureLength: len(data), Length: len(data)}, data); err != nil {
		t.Fatal(err)
	}
}

func tried(t *testing.T, f Filter, interpret bool, capture []byte) TrialResult {
	t.Helper()
	trial, err := NewTrial(f, interpret)
	if err != nil {
		t.Fatal(err)
	}
	defer trial.Close()
	if err := trial.Capture(bytes.NewReader(capture)); err != nil {
		t.Fatal(err)
	}
	r, err := trial.Result()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// The kernel and the interpreter count the same, in captures of every format and link type. Packets
// too long for the kernel are interpreted.
func TestTrial(t *testing.T) {
	f := Filter{Name: "try", Hook: HookTCX, Rules: []Rule{{Name: "all", Match: Expression{Text: "udp"}, Action: Count}, drops(53), drops(5060)}}
	frames := [][]byte{frame(t, 53, 10), frame(t, 53, 1200), frame(t, 5060, 9), frame(t, 80, 0), frame(t, 53, 8000), {1, 2, 3}}
	for _, c := range []struct {
		name   string
		link   layers.LinkType
		cut    int
		prefix string
	}{{"ethernet", layers.LinkTypeEthernet, 0, ""}, {"raw", layers.LinkTypeRaw, 14, ""}, {"sll", layers.LinkTypeLinuxSLL, 14, strings.Repeat("\x00", 14) + "\x08\x00"},
		{"sll2", layers.LinkTypeLinuxSLL2, 14, "\x08\x00" + strings.Repeat("\x00", 18)}, {"null", layers.LinkTypeNull, 14, "\x02\x00\x00\x00"}} {
		for _, kind := range []string{"pcap", "pcapng"} {
			for _, interpret := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s %s %v", c.name, kind, interpret), func(t *testing.T) {
					some := frames
					if c.cut > 0 {
						some = frames[:5] // the last one is too short to cut
					}
					r := tried(t, f, interpret, captureOf(t, kind, c.link, c.cut, []byte(c.prefix), some...))
					if want := uint64(len(some)); r.Packets != want || r.Skipped != 0 {
						t.Errorf("%d packets, %d skipped; want %d", r.Packets, r.Skipped, want)
					}
					got := fmt.Sprint(r.Rules[0].Packets, r.Rules[1].Packets, r.Rules[2].Packets, r.Default.Packets)
					want := fmt.Sprint(5, 3, 1, len(some)-4)
					if got != want {
						t.Errorf("matched %s, want %s: %+v", got, want, r)
					}
					if r.Rules[2].Bytes != uint64(len(frames[2])-c.cut) {
						t.Errorf("rule 5060 has %d bytes, want %d", r.Rules[2].Bytes, len(frames[2])-c.cut)
					}
					engine := "kernel"
					if interpret || os.Geteuid() != 0 {
						engine = "interpreter"
					}
					if r.Engine != engine || engine == "kernel" && (r.Interpreted == 0 || r.Interpreted > 2) {
						t.Errorf("by the %s, %d interpreted", r.Engine, r.Interpreted)
					}
				})
			}
		}
	}
}

func TestTrialSkips(t *testing.T) {
	f := Filter{Hook: HookTCX, Rules: []Rule{drops(53)}}
	r := tried(t, f, true, captureOf(t, "pcap", layers.LinkTypeIEEE802_11, 0, nil, frame(t, 53, 1)))
	if r.Packets != 0 || r.Skipped != 1 {
		t.Errorf("%+v", r)
	}
	trial, err := NewTrial(f, true)
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"", "abc", "no capture at all"} {
		if err := trial.Capture(bytes.NewReader([]byte(bad))); err == nil {
			t.Errorf("%q is accepted as a capture", bad)
		}
	}
}

// The header of a cooked capture determines the packet type. Non-IP packets are empty, whatever
// their bytes, and IP packets after VLAN tags are recognized.
func TestUnwrap(t *testing.T) {
	ip := frame(t, 53, 1)[14:]
	header := func(link layers.LinkType, kind string) []byte {
		if link == layers.LinkTypeLinuxSLL {
			return []byte(strings.Repeat("\x00", 14) + kind)
		}
		return []byte(kind + strings.Repeat("\x00", 18))
	}
	for _, link := range []layers.LinkType{layers.LinkTypeLinuxSLL, layers.LinkTypeLinuxSLL2} {
		for _, c := range []struct {
			kind, before string
			want         []byte
		}{{"\x08\x00", "", ip}, {"\x88\x47", "", nil}, {"\x00\x04", "", nil}, {"\x81\x00", "\x00\x64\x08\x00", ip},
			{"\x88\xa8", "\x00\x64\x81\x00\x00\x07\x08\x00", ip}, {"\x81\x00", "\x00\x64\x88\x47", nil}} {
			data := append(append(header(link, c.kind), c.before...), ip...)
			got, ok := unwrap(pcap.Record{Data: data, Wire: len(data) + 9, Link: link})
			missing := 9
			if c.want == nil {
				missing = 0
			}
			if got.Layer != expr.Network || !ok || !bytes.Equal(got.Data, c.want) || got.Missing != missing {
				t.Errorf("link type %s, %x %x: %+v, %t", link, c.kind, c.before, got, ok)
			}
		}
		if got, ok := unwrap(pcap.Record{Data: header(link, "\x81\x00"), Link: link}); len(got.Data) != 0 || got.Missing > 0 || !ok {
			t.Errorf("link type %s, an absent tag: %+v, %t", link, got, ok)
		}
		for _, kind := range []string{"\x08\x00", "\x81\x00"} {
			if got, ok := unwrap(pcap.Record{Data: header(link, kind)[:15], Wire: 100, Link: link}); len(got.Data) != 0 || got.Missing <= 0 || !ok {
				t.Errorf("link type %s, a cut header: %+v, %t", link, got, ok)
			}
		}
	}
}

// A truncated capture yields the complete packets before its end. A file ending between two packets
// is valid. This also holds for compressed captures and wrong length fields.
func TestTrialCut(t *testing.T) {
	f := Filter{Hook: HookTCX, Rules: []Rule{{Match: Expression{Text: "udp"}, Action: Count}}}
	for _, kind := range []string{"pcap", "pcapng"} {
		whole := captureOf(t, kind, layers.LinkTypeEthernet, 0, nil, frame(t, 53, 100), frame(t, 53, 100))
		ends := map[int]uint64{} // offsets of packet ends
		for packets := range 3 {
			ends[len(captureOf(t, kind, layers.LinkTypeEthernet, 0, nil, []([]byte){frame(t, 53, 100), frame(t, 53, 100)}[:packets]...))] = uint64(packets)
		}
		start := len(captureOf(t, kind, layers.LinkTypeEthernet, 0, nil))
		for n := start; n <= len(whole); n++ {
			trial, err := NewTrial(f, true)
			if err != nil {
				t.Fatal(err)
			}
			err = trial.Capture(bytes.NewReader(whole[:n]))
			r, _ := trial.Result()
			want, clean := ends[n]
			switch {
			case clean && (err != nil || r.Rules[0].Packets != want):
				t.Errorf("%s of %d bytes: %v, %d packets, want %d", kind, n, err, r.Packets, want)
			case !clean && !errors.Is(err, ErrCutShort):
				t.Errorf("%s cut within a packet, after %d bytes: %v", kind, n, err)
			}
		}
		var z bytes.Buffer
		w := gzip.NewWriter(&z)
		if _, err := w.Write(whole); err != nil {
			t.Fatal(err)
		}
		w.Close()
		if r := tried(t, f, true, z.Bytes()); r.Rules[0].Packets != 2 {
			t.Errorf("%s, compressed: %+v", kind, r)
		}
	}
	damaged := captureOf(t, "pcap", layers.LinkTypeEthernet, 0, nil, frame(t, 53, 100), frame(t, 53, 100))
	copy(damaged[len(damaged)-142-8:], "\xff\xff\xff\xff") // the second packet's length
	trial, err := NewTrial(f, true)
	if err != nil {
		t.Fatal(err)
	}
	err = trial.Capture(bytes.NewReader(damaged))
	if r, _ := trial.Result(); !errors.Is(err, ErrCutShort) || !strings.Contains(err.Error(), "read packet 2") || r.Packets != 1 {
		t.Errorf("a damaged capture: %v, %+v", err, r)
	}
	lie := captureOf(t, "pcap", layers.LinkTypeEthernet, 0, nil, frame(t, 53, 100))
	copy(lie[16:], "\x10\x00\x00\x00") // the header's snapshot length
	if r := tried(t, f, true, lie); r.Rules[0].Packets != 1 {
		t.Errorf("a packet longer than in the header: %+v", r)
	}
}

// Several filters process a capture in one pass. Each packet is skipped or tried for all.
func TestReadCapture(t *testing.T) {
	var trials []*Trial
	for _, port := range []int{53, 80} {
		trial, err := NewTrial(Filter{Hook: HookTCX, Rules: []Rule{drops(port)}}, true)
		if err != nil {
			t.Fatal(err)
		}
		trials = append(trials, trial)
	}
	c := captureOf(t, "pcap", layers.LinkTypeEthernet, 0, nil, frame(t, 53, 1), frame(t, 80, 1), frame(t, 53, 1))
	if err := ReadCapture(bytes.NewReader(c), trials...); err != nil {
		t.Fatal(err)
	}
	for i, want := range []uint64{2, 1} {
		if r, err := trials[i].Result(); err != nil || r.Packets != 3 || r.Rules[0].Packets != want {
			t.Errorf("filter %d: %+v, %v", i, r, err)
		}
	}
}

// An unknown list is an expression error, with either engine.
func TestTrialLists(t *testing.T) {
	f := Filter{Hook: HookTCX, Rules: []Rule{{Match: Expression{Text: "udp and ip.src in $some"}, Action: Count}}}
	for _, interpret := range []bool{false, true} {
		if _, err := NewTrial(f, interpret); !IsExpressionError(err) || !strings.Contains(err.Error(), `column 9: there is no list "some": name its file`) {
			t.Errorf("interpreted %t: %v", interpret, err)
		}
	}
	if _, err := Explain("ip.src in $some", HookTCX, nil); !IsExpressionError(err) {
		t.Error(err)
	}
	f.Lists = map[string]string{"some": filepath.Join(t.TempDir(), "some")}
	if _, err := NewTrial(f, true); err == nil || !strings.HasPrefix(err.Error(), "list some: open ") {
		t.Error(err)
	}
	long := strings.Repeat("#", 1<<17) // longer than a Scanner's line
	if err := os.WriteFile(f.Lists["some"], []byte(long+"\n192.0.2.0/24 # "+long), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, interpret := range []bool{false, true} {
		if !interpret && os.Geteuid() != 0 {
			continue
		}
		if r := tried(t, f, interpret, captureOf(t, "pcap", layers.LinkTypeEthernet, 0, nil, frame(t, 53, 1))); r.Rules[0].Packets != 1 {
			t.Errorf("interpreted %t: %+v", interpret, r)
		}
	}
	if x, err := Explain("ip.src in $some", HookTCX, f.Lists); err != nil || x.Instructions == 0 {
		t.Errorf("%+v, %v", x, err)
	}
}

// Rates follow the capture's timestamps: ten packets a second.
func TestTrialRates(t *testing.T) {
	var frames [][]byte
	for range 30 {
		frames = append(frames, frame(t, 53, 1))
	}
	for limit, want := range map[string]uint64{"5/s": 1, "20/s": 0} {
		f := Filter{Hook: HookTCX, Rules: []Rule{{Match: Expression{Text: "rate(ip.src) > " + limit}, Action: Count}}}
		r := tried(t, f, false, captureOf(t, "pcap", layers.LinkTypeEthernet, 0, nil, frames...))
		if r.Engine != "interpreter" || (r.Rules[0].Packets > 0) != (want > 0) {
			t.Errorf("%s: %+v", limit, r)
		}
	}
}

func TestExplain(t *testing.T) {
	for _, h := range append(hooks[:len(hooks):len(hooks)], HookSocket) {
		if h == HookNetfilter {
			needHook(t, h) // the program calls a function of this kernel
		}
		x, err := Explain("udp.dstport   ==  53", h, nil)
		if err != nil {
			t.Fatal(err)
		}
		if x.Expression != "udp.dstport == 53" || x.Hook != h || x.Instructions == 0 || len(x.Program) < x.Instructions || len(x.Maps) == 0 {
			t.Errorf("%s: %+v", h, x)
		}
	}
	for text, h := range map[string]Hook{"udp.dsport == 53": HookTCX, "eth.type == 2048": HookNFT, "eth.type == 0x800": HookSocket} {
		if _, err := Explain(text, h, nil); !IsExpressionError(err) {
			t.Errorf("%s: %v", text, err)
		}
	}
}
