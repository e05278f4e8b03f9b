// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
)

// Kind is what a line of a collector's output is about.
type Kind int

const (
	Flows   Kind = iota // IPFIX: so many records of one device and one ingress interface
	Route               // BMP: an announced route
	PeerUp              // BMP: a BGP neighbour of the device is up
	Other               // BMP: anything else a device sent: Initiation, statistics, Termination
	Session             // nfacctd's own note that a session was opened
	Closed              // and that one was closed
	Gap                 // IPFIX: nfacctd missed sequence numbers of a device
	Crashed             // the collector ended, and nobody killed it
	Odd                 // a line that should not be: an error, or output that cannot be read
)

// Record is one line that a collector wrote about what it received.
type Record struct {
	Kind        Kind
	Device      netip.Addr // as the collector saw the source
	Epoch       uint32     // ingress interface of flows, MED of a route
	Count       int        // packets of flows; 1 otherwise
	Port        int        // remote port that a Peer Up names
	Incarnation int        // which of the collector's lives wrote it, from 1
	Text        string     // the line, if odd
}

// flowLine is what the print plugin writes with aggregate peer_src_ip, in_iface.
type flowLine struct {
	Peer    string `json:"peer_ip_src"`
	In      uint32 `json:"iface_in"`
	Packets int    `json:"packets"`
}

// bmpLine is what bmp_daemon_msglog_file holds.
type bmpLine struct {
	Event      string `json:"event_type"`
	Router     string `json:"bmp_router"`
	Message    string `json:"bmp_msg_type"`
	Log        string `json:"log_type"`
	MED        uint32 `json:"med"`
	RemotePort int    `json:"remote_port"`
}

// device parses a source address; IPv4 that came in on an IPv6 socket is IPv4.
func device(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	return a.Unmap(), err
}

func parseFlows(line []byte) Record {
	var l flowLine
	if err := json.Unmarshal(line, &l); err != nil {
		return odd("flows", line, err)
	}
	a, err := device(l.Peer)
	if err != nil {
		return odd("flows", line, err)
	}
	return Record{Kind: Flows, Device: a, Epoch: l.In, Count: l.Packets}
}

func parseBMP(line []byte) Record {
	var l bmpLine
	if err := json.Unmarshal(line, &l); err != nil {
		return odd("BMP", line, err)
	}
	a, err := device(l.Router)
	if err != nil {
		return odd("BMP", line, err)
	}
	r := Record{Device: a, Count: 1}
	switch {
	case l.Message == "route_monitor":
		r.Kind, r.Epoch = Route, l.MED
	case l.Message == "peer_up":
		r.Kind, r.Port = PeerUp, l.RemotePort
	case l.Message != "":
		r.Kind = Other
	case l.Event == "log_close":
		r.Kind = Closed
	default:
		r.Kind = Session
	}
	return r
}

func odd(what string, line []byte, err error) Record {
	return Record{Kind: Odd, Count: 1, Text: fmt.Sprintf("%s output: %v: %.200s", what, err, line)}
}

// usual are the lines that a healthy nfacctd logs. The build line lists compiler options such as
// -Werror. Connections of one device overlap when it reconnects before nfacctd noticed the end of the old one.
var usual = regexp.MustCompile(`^INFO \( |^NOTICE|^OK:|^$|Multiple connections from peer`)

// unusual among them are those that tell of trouble in spite of their level.
var unusual = regexp.MustCompile(`(?i)unable|unknown|malformed|discard|missing|expecting|error|fail`)

// gap is what nfacctd logs when the sequence number is not the last one plus the records it decoded: also
// after records whose template it does not have, in a collector that started later than the exporter.
var gap = regexp.MustCompile(`expecting flow .* agent=(.*):[0-9]+$`)

// parseLog judges a line of the log; ok is false for a usual one.
func parseLog(line []byte) (r Record, ok bool) {
	if m := gap.FindSubmatch(line); m != nil {
		if a, err := device(string(m[1])); err == nil {
			return Record{Kind: Gap, Device: a, Count: 1, Text: string(line)}, true
		}
	}
	if usual.Match(line) && (!unusual.Match(line) || bytes.Contains(line, []byte("--build="))) {
		return Record{}, false
	}
	return Record{Kind: Odd, Count: 1, Text: string(line)}, true
}

// lasting tells whether what begins at a byte of the log was said before the process was killed.
func (l *life) lasting(at int64) bool {
	killed := l.killed.Load()
	return killed < 0 || at < killed
}

// orphaned tells whether a line is what a plugin says when its core has crashed, which is reported as such.
func (l *life) orphaned(line []byte) bool {
	return !l.proc.Running() && bytes.Contains(line, []byte("Core process *seems* gone"))
}

// Poll reads what the collector wrote since the last call, in all its lives.
func (c *Collector) Poll(f func(Record)) error {
	c.mu.Lock()
	lives := slices.Clone(c.lives) // f is called without the lock
	c.mu.Unlock()
	for _, l := range lives {
		give := func(r Record) {
			r.Incarnation = l.number
			f(r)
		}
		c.crash(l, give)
		if c.program == "goflow2" || c.program == "nfcapd" {
			if err := c.pollOther(l, give); err != nil {
				return err
			}
			continue
		}
		if err := l.flows.lines(func(line []byte, _ int64) { give(parseFlows(line)) }); err != nil {
			return err
		}
		if err := l.bmp.lines(func(line []byte, _ int64) { give(parseBMP(line)) }); err != nil {
			return err
		}
		err := l.log.lines(func(line []byte, at int64) {
			// What a daemon says while it is killed is not about decoding.
			if r, ok := parseLog(line); ok && l.lasting(at) && !l.orphaned(line) {
				r.Text = fmt.Sprintf("%s, life %d: %s", c, l.number, r.Text)
				give(r)
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}
