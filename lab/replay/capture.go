// SPDX-License-Identifier: Apache-2.0

// Package replay reads captures of real telemetry. Tests can resend real routers' packets from any number
// of routers.
package replay

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
)

// Device is one router's traffic in a capture.
type Device struct {
	Name    string     // capture and source
	Source  netip.Addr // invalid if the capture has only payloads
	UDP     [][]byte   // payloads in order
	Streams [][]byte   // TCP streams, reassembled
}

// Load reads every capture below a directory: .pcap files, and .bin files of one UDP payload each. The
// files DEVICE__PART.bin belong to one device. It returns the devices with traffic by name.
func Load(dir string) ([]Device, error) {
	var all []Device
	bins := map[string]*Device{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		switch filepath.Ext(path) {
		case ".pcap":
			devices, err := readPcap(path, strings.TrimSuffix(name, ".pcap"))
			all = append(all, devices...)
			return err
		case ".bin":
			payload, err := os.ReadFile(path)
			device, _, _ := strings.Cut(strings.TrimSuffix(name, ".bin"), "__")
			if bins[device] == nil {
				bins[device] = &Device{Name: device}
			}
			bins[device].UDP = append(bins[device].UDP, payload) // WalkDir uses lexical order
			return err
		}
		return nil
	})
	for _, d := range bins {
		all = append(all, *d)
	}
	slices.SortFunc(all, func(a, b Device) int { return cmp.Compare(a.Name, b.Name) })
	return all, err
}

// readPcap reads one capture; a device is a source address.
func readPcap(path, name string) ([]Device, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r, err := pcapgo.NewReader(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	udp := map[netip.Addr][][]byte{}
	tcp := map[flow][]segment{}
	for {
		data, ci, err := r.ReadPacketData()
		if errors.Is(err, io.EOF) && ci.CaptureLength == 0 {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if ci.CaptureLength < ci.Length {
			return nil, fmt.Errorf("%s: %w", path, errCut)
		}
		file(gopacket.NewPacket(data, r.LinkType(), gopacket.NoCopy), udp, tcp)
	}
	streams := map[netip.Addr][][]byte{}
	for _, k := range slices.SortedFunc(maps.Keys(tcp), flow.compare) {
		stream, err := rebuild(tcp[k])
		if err != nil {
			return nil, fmt.Errorf("%s: stream of %s: %w", path, k.from, err)
		}
		if len(stream) > 0 {
			streams[k.from.Addr()] = append(streams[k.from.Addr()], stream)
		}
	}
	return devices(name, udp, streams), nil
}

func devices(name string, udp, streams map[netip.Addr][][]byte) []Device {
	sources := map[netip.Addr]bool{}
	for a := range udp {
		sources[a] = true
	}
	for a := range streams {
		sources[a] = true
	}
	var all []Device
	for a := range sources {
		all = append(all, Device{Name: name + " " + a.String(), Source: a, UDP: udp[a], Streams: streams[a]})
	}
	return all
}

// flow is one direction of a TCP connection.
type flow struct{ from, to netip.AddrPort }

func (f flow) compare(g flow) int {
	return cmp.Or(f.from.Compare(g.from), f.to.Compare(g.to))
}

// segment is one piece of a flow.
type segment struct {
	seq  uint32
	data []byte
}

// file adds a packet's payload to its device or flow. It skips packets without payload, and other
// protocols.
func file(p gopacket.Packet, udp map[netip.Addr][][]byte, tcp map[flow][]segment) {
	network := p.NetworkLayer()
	if network == nil {
		return
	}
	src, _ := netip.AddrFromSlice(network.NetworkFlow().Src().Raw())
	dst, _ := netip.AddrFromSlice(network.NetworkFlow().Dst().Raw())
	switch t := p.TransportLayer().(type) {
	case *layers.UDP:
		if len(t.Payload) > 0 {
			udp[src] = append(udp[src], slices.Clone(t.Payload))
		}
	case *layers.TCP:
		if len(t.Payload) > 0 {
			k := flow{netip.AddrPortFrom(src, uint16(t.SrcPort)), netip.AddrPortFrom(dst, uint16(t.DstPort))}
			tcp[k] = append(tcp[k], segment{t.Seq, slices.Clone(t.Payload)})
		}
	}
}

// errCut reports a partial packet in a capture: resent it would be a different packet.
var errCut = errors.New("packet truncated by the snaplen: capture whole packets (tcpdump -s 0)")

// errGap reports a missing part of a stream: the rest cannot be decoded.
var errGap = errors.New("bytes are missing")

// rebuild sorts segments by sequence number (modulo 2^32, RFC 9293 section 3.4). It drops duplicates.
func rebuild(segments []segment) ([]byte, error) {
	if len(segments) == 0 {
		return nil, nil
	}
	first := segments[0].seq
	at := func(s segment) int32 { return int32(s.seq - first) }
	slices.SortStableFunc(segments, func(a, b segment) int { return cmp.Compare(at(a), at(b)) })
	next := at(segments[0])
	var stream []byte
	for _, s := range segments {
		begin := at(s)
		if begin > next {
			return nil, fmt.Errorf("%w: %d before byte %d", errGap, begin-next, begin)
		}
		if known := int(next - begin); known < len(s.data) {
			stream = append(stream, s.data[known:]...)
			next = begin + int32(len(s.data))
		}
	}
	return stream, nil
}
