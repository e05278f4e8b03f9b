// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/internal/ipfix"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// chunkBytes is TEMPLATES_CHUNK.
const chunkBytes = 480

// templateStore is a namespace's pinned maps, open for writing. Only weir serve writes them.
type templateStore struct {
	Pins *kernel.Opened
	id   ebpf.MapID // of the sessions map: another map may be pinned in its place
}

// OpenStore opens the pins of a namespace. It creates missing pins.
func OpenStore(l *kernel.WriteLock, ns *netns.Handle) (*templateStore, error) {
	i := engine.TemplatesInstance(record.Scope(ns))
	pins, err := l.Open(i)
	if errors.Is(err, kernel.ErrNotExist) {
		if err = publishTemplates(l, ns, nil); err == nil {
			pins, err = l.Open(i)
		}
	}
	if err == nil {
		if err = pins.Meta.RequireABI(i, record.ABI); err != nil {
			pins.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open the templates of namespace %s: %w", record.Scope(ns), err)
	}
	id, err := mapID(pins.Maps["sessions"])
	if err != nil {
		pins.Close()
		return nil, err
	}
	return &templateStore{pins, id}, nil
}

// publishTemplates publishes new maps with these sessions.
func publishTemplates(l *kernel.WriteLock, ns *netns.Handle, sessions Saved) error {
	spec, err := bpf.LoadTemplates()
	if err != nil {
		return err
	}
	pins := kernel.Pins{Maps: map[string]*ebpf.Map{}}
	for pin, name := range map[string]string{"sessions": bpf.TemplatesMapTemplatesSessions,
		"store": bpf.TemplatesMapTemplatesStore, "counts": bpf.TemplatesMapTemplatesCounts} {
		m, err := ebpf.NewMap(spec.Maps[name])
		if err != nil {
			return fmt.Errorf("create map %s: %w", name, err)
		}
		defer m.Close()
		pins.Maps[pin] = m
	}
	store := &templateStore{Pins: &kernel.Opened{Maps: pins.Maps}}
	for _, s := range sessions {
		k, v := s.read()
		if v == nil {
			continue
		}
		if err := errors.Join(store.Save(k, v), store.Enter(k, bpf.TemplatesHeard{})); err != nil {
			return err
		}
	}
	return record.Shared.Publish(l, engine.TemplatesInstance(record.Scope(ns)), instances.Form[struct{}]{Netns: ns, Object: kernel.ObjectHash(bpf.TemplatesObject), Pins: pins})
}

func mapID(m *ebpf.Map) (ebpf.MapID, error) {
	info, err := m.Info()
	if err != nil {
		return 0, err
	}
	id, _ := info.ID()
	return id, nil
}

// pinned reports whether these maps are still the pinned ones.
func (s *templateStore) pinned(r *kernel.Root) bool {
	o, err := r.Open(s.Pins.Instance, "sessions")
	if err != nil {
		return false
	}
	defer o.Close()
	id, err := mapID(o.Maps["sessions"])
	return err == nil && id == s.id
}

func (s *templateStore) Close() { s.Pins.Close() }

// heard returns the header of a session's latest message, or zero.
func (s *templateStore) heard(k bpf.TemplatesSession) (h bpf.TemplatesHeard) {
	_ = s.Pins.Maps["sessions"].Lookup(k, &h) // a missing entry is zero
	return h
}

// Enter makes the filter record a session's headers.
func (s *templateStore) Enter(k bpf.TemplatesSession, h bpf.TemplatesHeard) error {
	err := s.Pins.Maps["sessions"].Update(k, h, ebpf.UpdateNoExist)
	if errors.Is(err, ebpf.ErrKeyExist) {
		return nil
	}
	return err
}

// Save writes a session: first new chunks over the old ones, then it deletes surplus chunks. A reader discards a
// session with mixed generations, because the exporter will repeat its templates.
func (s *templateStore) Save(k bpf.TemplatesSession, v *FlowSession) error {
	b := v.marshal()
	v.Generation++
	crc, n := crc32.ChecksumIEEE(b), 0
	for piece := range slices.Chunk(b, chunkBytes) {
		c := bpf.TemplatesChunk{Generation: v.Generation, Crc: crc, Length: uint32(len(b))}
		copy(c.Data[:], piece)
		if err := s.Pins.Maps["store"].Put(bpf.TemplatesChunkKey{Session: k, N: uint32(n)}, c); err != nil {
			return fmt.Errorf("store the templates of %s: %w", exporterAddr(k), err)
		}
		n++
	}
	for i := n; i < v.Chunks; i++ {
		s.Pins.Maps["store"].Delete(bpf.TemplatesChunkKey{Session: k, N: uint32(i)})
	}
	v.Chunks = n
	return nil
}

// remove deletes a session.
func (s *templateStore) remove(k bpf.TemplatesSession, v *FlowSession) {
	for i := range v.Chunks {
		s.Pins.Maps["store"].Delete(bpf.TemplatesChunkKey{Session: k, N: uint32(i)})
	}
	s.Pins.Maps["sessions"].Delete(k)
}

// count adds to a service's counters.
func (s *templateStore) count(service string, add bpf.TemplatesCounts) error {
	m := s.Pins.Maps["counts"]
	var key [64]byte
	copy(key[:63], service)
	var c bpf.TemplatesCounts
	if err := m.Lookup(key, &c); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	c.Learnt += add.Learnt
	c.Replayed += add.Replayed
	c.Refused += add.Refused
	return m.Put(key, c)
}

// loadSessions reads the remembered sessions. It returns inconsistent entries in broken, for a writer to delete.
func loadSessions(m *ebpf.Map) (all map[bpf.TemplatesSession]*FlowSession, broken []bpf.TemplatesChunkKey, err error) {
	pieces := map[bpf.TemplatesSession][]bpf.TemplatesChunkKey{}
	chunks := map[bpf.TemplatesChunkKey]*bpf.TemplatesChunk{}
	var k bpf.TemplatesChunkKey
	var c bpf.TemplatesChunk
	for it := m.Iterate(); ; {
		if !it.Next(&k, &c) {
			// Aborted: a busy writer. Checksums verify the sessions read so far.
			if err := it.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
				return nil, nil, fmt.Errorf("read templates: %w", err)
			}
			break
		}
		if chunks[k] == nil {
			pieces[k.Session] = append(pieces[k.Session], k)
		}
		one := c
		chunks[k] = &one
	}
	all = map[bpf.TemplatesSession]*FlowSession{}
	for key, ks := range pieces {
		slices.SortFunc(ks, func(a, b bpf.TemplatesChunkKey) int { return cmp.Compare(a.N, b.N) })
		if s := joinChunks(ks, chunks); s != nil {
			all[key] = s
		} else {
			broken = append(broken, ks...)
		}
	}
	return all, broken, nil
}

// joinChunks returns the session in chunks, or nil if they are inconsistent.
func joinChunks(ks []bpf.TemplatesChunkKey, chunks map[bpf.TemplatesChunkKey]*bpf.TemplatesChunk) *FlowSession {
	first := chunks[ks[0]]
	var b []byte
	for i, k := range ks {
		c := chunks[k]
		if int(k.N) != i || c.Generation != first.Generation {
			return nil
		}
		b = append(b, c.Data[:]...)
	}
	if int(first.Length) > len(b) || crc32.ChecksumIEEE(b[:first.Length]) != first.Crc {
		return nil
	}
	s := &FlowSession{Generation: first.Generation, Chunks: len(ks)}
	if s.unmarshal(b[:first.Length]) != nil {
		return nil
	}
	return s
}

// storedSession is the stored form of a session: fixed fields in host byte order, then each template's number, kind,
// length and record.
type storedSession struct {
	Tgid      uint32
	Templates uint32
	Start     uint64
	Learnt    int64
	Replayed  int64
	Replays   uint32
	Pad       uint32
	Born      uint64
}

type storedTemplate struct {
	ID, Options, Length, Pad uint16
}

// marshal returns the stored form of a session, before its division into chunks.
func (s *FlowSession) marshal() []byte {
	ne := binary.NativeEndian
	b, _ := binary.Append(nil, ne, storedSession{Tgid: s.Served.Tgid, Start: s.Served.Start, Templates: uint32(len(s.Templates)),
		Learnt: s.Learnt, Replayed: s.Replayed, Replays: s.Replays, Born: s.Born}) // of fixed size: cannot fail
	for _, t := range s.Templates {
		h := storedTemplate{ID: t.ID, Length: uint16(len(t.Record))}
		if t.Options {
			h.Options = 1
		}
		b, _ = binary.Append(b, ne, h)
		b = append(b, t.Record...)
	}
	return b
}

// unmarshal reads the output of marshal. After an error the session is undefined.
func (s *FlowSession) unmarshal(b []byte) error {
	var h storedSession
	n, err := binary.Decode(b, binary.NativeEndian, &h)
	if err != nil {
		return err
	}
	b = b[n:]
	s.Served = MemberID{h.Tgid, h.Start}
	s.Learnt, s.Replayed, s.Replays, s.Born = h.Learnt, h.Replayed, h.Replays, h.Born
	for range h.Templates {
		var t storedTemplate
		if n, err = binary.Decode(b, binary.NativeEndian, &t); err != nil {
			return err
		}
		if b = b[n:]; int(t.Length) > len(b) {
			return ipfix.ErrMalformed
		}
		s.Templates = append(s.Templates, ipfix.Template{ID: t.ID, Options: t.Options == 1, Record: slices.Clone(b[:t.Length])})
		s.Bytes += int(t.Length)
		b = b[t.Length:]
	}
	return nil
}
