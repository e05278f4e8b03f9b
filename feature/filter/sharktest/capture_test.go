// SPDX-License-Identifier: Apache-2.0

package sharktest

import (
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
	"github.com/weir-project/weir/feature/filter"
)

// shared has captures of real routers, stored beside the repository by its maintainers.
const shared = "../../../../shared/data/captures"

// capture is a file and its packets as captures of one packet each. Trial tells only whether a
// whole capture matched.
type capture struct {
	name    string
	path    string
	labels  []string // of a generated capture
	packets [][]byte
}

// generatedCapture returns a capture of the test's own packets.
func generatedCapture(t *testing.T, link layers.LinkType) *capture {
	t.Helper()
	return writeCapture(t, "generated as "+link.String(), link, generated())
}

// writeCapture writes packets as a capture with a link type: Ethernet, raw IP (only IP packets) or
// Linux cooked (only untagged packets).
func writeCapture(t *testing.T, name string, link layers.LinkType, packets []packet) *capture {
	t.Helper()
	c := &capture{name: name, path: filepath.Join(t.TempDir(), "written.pcap")}
	var all bytes.Buffer
	w := pcapgo.NewWriter(&all)
	check(t, w.WriteFileHeader(1<<16, link))
	for i, p := range packets {
		data, cut := p.data, 0
		if link != layers.LinkTypeEthernet {
			if len(data) < 15 || !carriedBy(link, be.Uint16(data[12:])) {
				continue
			}
			cut = 14
		}
		data = data[cut:]
		ci := gopacket.CaptureInfo{Timestamp: time.Unix(1700000000, int64(i)*1e6), CaptureLength: len(data), Length: max(len(data), p.wire-cut)}
		if link == layers.LinkTypeLinuxSLL {
			data = append([]byte("\x00\x00\x00\x01\x00\x06"+clientMAC+"\x00\x00"+string(p.data[12:14])), data...)
			ci.CaptureLength, ci.Length = ci.CaptureLength+16, ci.Length+16
		}
		check(t, w.WritePacket(ci, data))
		c.labels = append(c.labels, p.label)
		c.packets = append(c.packets, single(t, link, ci, data))
	}
	check(t, os.WriteFile(c.path, all.Bytes(), 0o600))
	return c
}

// carriedBy reports whether packets of an EtherType are written with a link type other than
// Ethernet. Tags and lengths are not: link-layer fields exist for Ethernet only.
func carriedBy(link layers.LinkType, etherType uint16) bool {
	switch etherType {
	case 0x0800, 0x86dd:
		return true
	case 0x0806, 0x88b5, 0x8847, 0x8864:
		return link == layers.LinkTypeLinuxSLL
	}
	return false
}

// single returns a capture of one packet.
func single(t *testing.T, link layers.LinkType, ci gopacket.CaptureInfo, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := pcapgo.NewWriter(&b)
	check(t, w.WriteFileHeader(1<<16, link))
	check(t, w.WritePacket(ci, data))
	return b.Bytes()
}

// sharedCaptures returns all real captures.
func sharedCaptures(t *testing.T) []*capture {
	t.Helper()
	if _, err := os.Stat(shared); err != nil {
		t.Skip("need: captures of real telemetry in", shared, "(TestGenerated runs on generated packets)")
	}
	var all []*capture
	check(t, filepath.WalkDir(shared, func(path string, _ fs.DirEntry, err error) error {
		if err == nil && strings.HasPrefix(filepath.Ext(path), ".pcap") {
			all = append(all, readCapture(t, path))
		}
		return err
	}))
	if len(all) < 14 {
		t.Errorf("got %d captures in %s, want 14", len(all), shared)
	}
	return append(all, payloads(t))
}

// payloads returns a capture of the datagrams stored as payloads only, one a file.
func payloads(t *testing.T) *capture {
	t.Helper()
	files, err := filepath.Glob(shared + "/telegraf/*.bin")
	check(t, err)
	var packets []packet
	for _, file := range files {
		b, err := os.ReadFile(file)
		check(t, err)
		port := uint16(2055) // NetFlow and IPFIX
		if strings.HasPrefix(filepath.Base(file), "sflow") {
			port = 6343
		}
		packets = append(packets, ip4(filepath.Base(file), pUDP, udp(40000, port, string(b))))
	}
	if len(packets) < 22 {
		t.Errorf("got %d payloads in %s, want 22", len(packets), shared)
	}
	return writeCapture(t, "telegraf", layers.LinkTypeEthernet, packets)
}

func readCapture(t *testing.T, path string) *capture {
	t.Helper()
	f, err := os.Open(path)
	check(t, err)
	defer f.Close()
	r, err := pcapgo.NewReader(f)
	check(t, err)
	c := &capture{name: strings.TrimPrefix(path, shared+"/"), path: path}
	for {
		data, ci, err := r.ReadPacketData()
		if err == io.EOF {
			return c
		}
		check(t, err)
		c.packets = append(c.packets, single(t, r.LinkType(), ci, data))
	}
}

// label returns the name of a packet.
func (c *capture) label(frame int) string {
	if c.labels == nil {
		return fmt.Sprintf("%s frame %d", c.name, frame)
	}
	return c.labels[frame-1]
}

// maxSearches is the maximum number of contains and matches in a program of an old kernel.
const maxSearches = 8

// weirs tries the pairs' expressions on each packet of captures. It returns the answers by capture
// and expression.
func weirs(t *testing.T, captures []*capture, some []pair, interpret bool) [][]answer {
	t.Helper()
	out := make([][]answer, len(captures))
	for len(some) > 0 {
		n, searches := 0, 0
		for ; n < len(some); n++ {
			if searches += strings.Count(some[n].weir, "contains") + strings.Count(some[n].weir, "matches"); searches > maxSearches {
				break
			}
		}
		tr := newTries(t, some[:n], interpret)
		for i, c := range captures {
			out[i] = append(out[i], tr.each(t, c)...)
		}
		some = some[n:]
	}
	return out
}

// answer is the packets matched by an expression, and the undecidable ones.
type answer struct{ match, unsure frames }

// tries makes expressions the rules of one program, loaded once for all captures.
type tries struct {
	*filter.Trial
	before filter.TrialResult
}

func newTries(t *testing.T, some []pair, interpret bool) *tries {
	t.Helper()
	f := filter.Filter{Hook: filter.HookTCX, Default: filter.Pass}
	for _, p := range some {
		f.Rules = append(f.Rules, filter.Rule{Match: filter.Expression{Text: p.weir}, Action: filter.Count})
	}
	trial, err := filter.NewTrial(f, interpret)
	check(t, err)
	t.Cleanup(trial.Close)
	tr := &tries{Trial: trial}
	tr.before, err = trial.Result()
	check(t, err)
	engine := "kernel"
	if interpret {
		engine = "interpreter"
	}
	if tr.before.Engine != engine {
		t.Fatalf("want the %s, but the %s decided", engine, tr.before.Engine)
	}
	return tr
}

// more returns, for each rule, the number of additional matches and of additional undecided packets
// by a capture.
func (tr *tries) more(t *testing.T, r io.Reader) (matched, unsure []uint64) {
	t.Helper()
	check(t, tr.Capture(r))
	now, err := tr.Result()
	check(t, err)
	if now.Skipped != 0 {
		t.Fatalf("%d packets were skipped", now.Skipped)
	}
	for i := range now.Rules {
		matched = append(matched, now.Rules[i].Packets-tr.before.Rules[i].Packets)
		unsure = append(unsure, now.Rules[i].Undecided-tr.before.Rules[i].Undecided)
	}
	tr.before = now
	return matched, unsure
}

// each returns the matches of each rule, one packet at a time. It checks their number against the
// whole capture.
func (tr *tries) each(t *testing.T, c *capture) []answer {
	t.Helper()
	out := make([]answer, len(tr.before.Rules))
	for i := range out {
		out[i] = answer{frames{}, frames{}}
	}
	for i, p := range c.packets {
		matched, unsure := tr.more(t, bytes.NewReader(p))
		for rule := range out {
			if matched[rule] > 0 {
				out[rule].match[i+1] = true
			}
			if unsure[rule] > 0 {
				out[rule].unsure[i+1] = true
			}
		}
	}
	f, err := os.Open(c.path)
	check(t, err)
	defer f.Close()
	matched, unsure := tr.more(t, f)
	for rule, a := range out {
		if int(matched[rule]) != len(a.match) || int(unsure[rule]) != len(a.unsure) {
			t.Errorf("%s: %s matches %d packets of the whole capture, but %d one by one; %d and %d are undecided", c.name, tr.before.Rules[rule].Match, matched[rule], len(a.match), unsure[rule], len(a.unsure))
		}
	}
	return out
}
