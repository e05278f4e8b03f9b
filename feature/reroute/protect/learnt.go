// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"time"

	"github.com/weir-project/weir/feature/reroute/protect/bpf"
	"github.com/weir-project/weir/feature/reroute/protect/srv6"
)

// keepSize is how long a size reported by a router is kept. It is the kernel's time for the MTU of a route (RFC 8201
// section 5.2). Tests change it.
var keepSize = 10 * time.Minute

// wayKey identifies a way by its device and outer headers.
type wayKey struct {
	ifindex          uint32
	header6, header4 [srv6.Room]byte
}

func newWayKey(r *bpf.ProtectRerouteRepair) wayKey { return wayKey{r.Ifindex, r.Header6, r.Header4} }

// learntSize is the largest packet a way can carry, with its outer headers.
type learntSize struct {
	mtu   uint32
	until time.Time
}

// leastSize is the lower bound of learnt sizes: every link carries IPv6 packets of 1,280 bytes.
func leastSize(r *bpf.ProtectRerouteRepair) uint32 { return LeastMTU + max(r.Len6, r.Len4) }

// about reports whether a message quotes a packet of a repair. The packet was sent by this router to one of the
// segments, with the later segments behind it. It must be too big for the reported link.
func (m tooBig) about(r *bpf.ProtectRerouteRepair) bool {
	if m.length <= m.mtu || m.length > r.Mtu {
		return false
	}
	return r.Flags&flagInline == 0 && m.has(r.Header6[:r.Len6]) || m.has(r.Header4[:r.Len4])
}

// has reports whether the quoted packet has these outer headers, in their form at any of the segments.
func (m tooBig) has(header []byte) bool {
	if len(header) < srv6.IPv6Length || !bytes.Equal(m.quoted[8:24], header[8:24]) {
		return false
	}
	next, to := m.quoted[6], m.quoted[24:40]
	if header[6] != srv6.NextRouting {
		return next == header[6] && bytes.Equal(to, header[24:40])
	}
	srh := header[srv6.IPv6Length:]
	segments := srh[srv6.HeaderLength:] // the last one first, without the first destination
	if next == srh[0] {                 // the last but one removed the routing header (RFC 8986 section 4.16.1)
		return bytes.Equal(to, segments[:srv6.SegmentLength])
	}
	quoted := m.quoted[srv6.IPv6Length:]
	if next != srv6.NextRouting || len(quoted) < len(srh) || !bytes.Equal(quoted[:3], srh[:3]) || !bytes.Equal(quoted[srv6.HeaderLength:len(srh)], segments) {
		return false
	}
	switch left := int(quoted[3]); {
	case left < int(srh[3]):
		return bytes.Equal(to, segments[left*srv6.SegmentLength:(left+1)*srv6.SegmentLength])
	case left == int(srh[3]):
		return bytes.Equal(to, header[24:40])
	}
	return false
}

// recall restores the sizes learnt by a previous process.
func (w *watcher) recall() error {
	w.tooBig = make(chan tooBig, 16)
	if w.sizes == nil {
		w.sizes = map[wayKey]learntSize{}
	}
	err := w.readRepairs()
	for _, r := range *w.repairs.Load() {
		if _, known := w.sizes[newWayKey(&r)]; !known && r.Flags&flagLearnt != 0 {
			w.sizes[newWayKey(&r)] = learntSize{r.Mtu, time.Now().Add(keepSize)}
		}
	}
	return err
}

// readRepairs loads the repairs now in use.
func (w *watcher) readRepairs() error {
	all, err := readRepairs(w.pins)
	sources := map[[srv6.SegmentLength]byte]bool{}
	for _, r := range all {
		sources[[srv6.SegmentLength]byte(r.Header6[8:24])], sources[[srv6.SegmentLength]byte(r.Header4[8:24])] = true, true
	}
	w.repairs.Store(&all)
	w.sources.Store(&sources)
	return err
}

// concerns reports whether a message is about an installed repair, in use or not.
func (w *watcher) concerns(m tooBig) bool {
	if !(*w.sources.Load())[[srv6.SegmentLength]byte(m.quoted[8:24])] {
		return false // cheap check first: anybody can send such messages
	}
	for _, r := range *w.repairs.Load() {
		if m.about(&r) {
			return true
		}
	}
	return false
}

// learn lowers the size of a repair with a smaller link on its way. Larger packets are then answered here, so their
// senders learn the size. A message about an unused repair changes nothing. No message lowers the size below IPv6's
// minimum.
func (w *watcher) learn(m tooBig) {
	for _, p := range w.Paths {
		for _, r := range *w.repairs.Load() {
			if int(r.Row) == p.Row && w.words.Get(r.Slot).Reasons() != 0 && r.Flags&flagShadow == 0 && m.about(&r) {
				w.learnSize(p, &r, m)
			}
		}
	}
}

func (w *watcher) learnSize(p published, r *bpf.ProtectRerouteRepair, m tooBig) {
	size, known := max(m.mtu, leastSize(r)), r.Mtu
	s, again := w.sizes[newWayKey(r)]
	if again {
		known = min(known, s.mtu)
	}
	if size >= known {
		return
	}
	w.sizes[newWayKey(r)] = learntSize{size, time.Now().Add(keepSize)}
	if again {
		w.follow() // bounds the work for a way with many sizes
	} else {
		w.followLink()
	}
	w.log.Warn("rerouted packets too big for a link on the way, answering larger ones with Packet Too Big", "name", p.Name, "interface", p.Device,
		"segment", netip.AddrFrom16([16]byte(m.quoted[24:40])), "mtu", m.mtu, "fits", size-r.Len6, "for", keepSize, "remedy", "give the repair this mtu, or the link a larger one")
}

// forgetSizes restores the full size of a way after keepSize, because the way may have changed.
func (w *watcher) forgetSizes(at time.Time) {
	for key, s := range w.sizes {
		if at.Before(s.until) {
			continue
		}
		delete(w.sizes, key)
		w.follow()
	}
}

// knownSizes returns the learnt sizes of the ways.
func (w *watcher) knownSizes() map[wayKey]uint32 {
	out := map[wayKey]uint32{}
	for key, s := range w.sizes {
		out[key] = s.mtu
	}
	return out
}

// installedSizes returns the learnt sizes in the maps.
func (s *instance) installedSizes() (map[wayKey]uint32, error) {
	all, err := readRepairs(s.pins)
	out := map[wayKey]uint32{}
	for _, r := range all {
		if r.Flags&flagLearnt != 0 {
			out[newWayKey(&r)] = r.Mtu
		}
	}
	return out, err
}

// shrink lowers the ways' sizes to the known ones.
func shrink(routes []route, sizes map[wayKey]uint32) {
	for _, t := range routes {
		for i := range t.ways {
			w := &t.ways[i]
			if size, ok := sizes[newWayKey(&w.ProtectRerouteRepair)]; ok && size < w.Mtu {
				w.Mtu, w.Flags = size, w.Flags|flagLearnt
			}
		}
	}
}

// quotedLength returns the total length of the quoted packet.
func quotedLength(quoted []byte) uint32 {
	return srv6.IPv6Length + uint32(binary.BigEndian.Uint16(quoted[4:6]))
}
