// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/weir-project/weir/lab"
)

// Collectors other than pmacct's. They accept NetFlow and IPFIX, not BMP.

// NewGoFlow2 prepares goflow2 number n, a Go program. It sets SO_REUSEPORT, so all may share the port.
func NewGoFlow2(e *lab.Env, binary, namespace string, n, port int) (*Collector, error) {
	return newCollector(e, &Collector{Number: n, Port: port, program: "goflow2", binary: binary, ns: namespace})
}

// goflow2Args sets one socket, because a slot holds one. It sets one worker, because two workers process
// one router's datagrams in parallel: data is then sometimes decoded before its template, and output lines
// mix.
func (c *Collector) goflow2Args(life int) []string {
	return []string{
		"-listen", fmt.Sprintf("netflow://:%d?count=1&workers=1", c.Port),
		"-addr", "", // no HTTP server: all would share its port
		"-format", "json", "-transport", "file", "-transport.file", c.path("flows", life),
	}
}

// goflow2Line is goflow2's output for one record.
type goflow2Line struct {
	Sampler string `json:"sampler_address"`
	In      uint32 `json:"in_if"`
	Packets int    `json:"packets"`
}

func parseGoFlow2(line []byte) Record {
	var l goflow2Line
	if err := json.Unmarshal(line, &l); err != nil {
		return odd("goflow2", line, err)
	}
	a, err := device(l.Sampler)
	if err != nil {
		return odd("goflow2", line, err)
	}
	return Record{Kind: Flows, Device: a, Epoch: l.In, Count: l.Packets}
}

// NewNfcapd prepares nfcapd number n, of Debian's nfdump. It does not set SO_REUSEPORT: each needs its own
// port.
func NewNfcapd(e *lab.Env, namespace string, n, port int) (*Collector, error) {
	return newCollector(e, &Collector{Number: n, Port: port, program: "nfcapd", ns: namespace, Bound: []string{fmt.Sprintf("udp :%d", port)}})
}

// nfcapdFiles are the completed files of a life of nfcapd.
type nfcapdFiles struct {
	read []string // names, sorted
}

func (c *Collector) nfcapdDir(life int) string {
	return filepath.Join(c.dir, fmt.Sprintf("flows-%d", life))
}

// nfcapdArgs sets -6, to listen on both families; the default is IPv4 alone. Every two seconds nfcapd
// begins a new file and writes its records in memory. Two must not share a directory.
func (c *Collector) nfcapdArgs(life int) ([]string, error) {
	dir := c.nfcapdDir(life)
	return []string{"-6", "-p", fmt.Sprint(c.Port), "-w", dir, "-t", "2", "-B", "4194304"}, os.MkdirAll(dir, 0o755)
}

// pollOther reads the output of a life of goflow2 or nfcapd.
func (c *Collector) pollOther(l *life, give func(Record)) error {
	if c.program == "goflow2" {
		return l.flows.lines(func(line []byte, _ int64) { give(parseGoFlow2(line)) })
	}
	names, err := filepath.Glob(filepath.Join(c.nfcapdDir(l.number), "nfcapd.2*")) // not nfcapd.current.PID
	if err != nil {
		return err
	}
	for _, name := range names {
		at, known := slices.BinarySearch(l.nfcapd.read, name)
		if known {
			continue
		}
		l.nfcapd.read = slices.Insert(l.nfcapd.read, at, name)
		out, err := exec.Command("nfdump", "-q", "-r", name, "-o", "fmt:%ra|%in|%pkt", "-6").Output()
		if err != nil {
			return fmt.Errorf("nfdump -r %s: %w", name, err)
		}
		for line := range bytes.Lines(out) {
			if string(line) == "No matching flows\n" { // an empty file
				continue
			}
			give(parseNfdump(line))
		}
	}
	return nil
}

// parseNfdump reads the address of the router, the ingress interface and the packets of one record.
func parseNfdump(line []byte) Record {
	f := strings.Split(strings.TrimSpace(string(line)), "|")
	var a netip.Addr
	var r Record
	err := fmt.Errorf("%d fields", len(f))
	if len(f) == 3 {
		if a, err = device(strings.TrimSpace(f[0])); err == nil {
			r = Record{Kind: Flows, Device: a}
			_, err = fmt.Sscan(f[1]+" "+f[2], &r.Epoch, &r.Count)
		}
	}
	if err != nil {
		return odd("nfdump", line, err)
	}
	return r
}
