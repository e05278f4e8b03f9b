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

// Kind is the subject of a line in a collector's output.
type Kind int

const (
	Flows   Kind = iota // IPFIX: number of records of one device and one ingress interface
	Route               // BMP: an announced route
	PeerUp              // BMP: a BGP neighbour of the device is up
	Other               // BMP: any other message of a device: Initiation, statistics, Termination
	Session             // nfacctd's own note about an opened session
	Closed              // nfacctd's own note about a closed session
	Gap                 // IPFIX: nfacctd missed sequence numbers of a device
	Crashed             // the collector ended without a kill
	Odd                 // an unexpected line: an error, or unreadable output
)

// Record is one line of a collector's output about a received message.
type Record struct {
	Kind        Kind
	Device      netip.Addr // source address seen by the collector
	Epoch       uint32     // ingress interface of flows, MED of a route
	Count       int        // packets of flows; 1 otherwise
	Port        int        // remote port of a Peer Up
	Incarnation int        // the collector's life, from 1
	Text        string     // the line, if odd
}

// flowLine is a line of the print plugin with aggregate peer_src_ip, in_iface.
type flowLine struct {
	Peer    string `json:"peer_ip_src"`
	In      uint32 `json:"iface_in"`
	Packets int    `json:"packets"`
}

// bmpLine is a line of bmp_daemon_msglog_file.
type bmpLine struct {
	Event      string `json:"event_type"`
	Router     string `json:"bmp_router"`
	Message    string `json:"bmp_msg_type"`
	Log        string `json:"log_type"`
	MED        uint32 `json:"med"`
	RemotePort int    `json:"remote_port"`
}

// device parses a source address. IPv4 on an IPv6 socket becomes IPv4.
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

// usual matches the log lines of a healthy nfacctd. The build line lists compiler options such as -Werror.
// Connections of one device overlap if it reconnects before nfacctd noticed the end of the old one.
var usual = regexp.MustCompile(`^INFO \( |^NOTICE|^OK:|^$|Multiple connections from peer`)

// unusual matches faults among them, despite their level.
var unusual = regexp.MustCompile(`(?i)unable|unknown|malformed|discard|missing|expecting|error|fail`)

// gap matches nfacctd's report of a sequence number other than the last one plus the decoded records. It
// also appears after records without a known template, in a collector started later than the exporter.
var gap = regexp.MustCompile(`expecting flow .* agent=(.*):[0-9]+$`)

// parseLog classifies a line of the log; ok is false for a usual one.
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

// lasting reports whether a line at this byte of the log was written before the process was killed.
func (l *life) lasting(at int64) bool {
	killed := l.killed.Load()
	return killed < 0 || at < killed
}

// orphaned reports whether a line is a plugin's message after a crash of its core. The crash is reported
// separately.
func (l *life) orphaned(line []byte) bool {
	return !l.proc.Running() && bytes.Contains(line, []byte("Core process *seems* gone"))
}

// Poll reads the collector's output since the last call, in all its lives.
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
			// A daemon's messages during its kill are not about decoding.
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
