// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
)

// Saved is the templates of a network namespace's exporters.
type Saved []savedSession

// savedSession is one exporter's session: key and value as in the store.
type savedSession struct {
	Key   []byte `json:"key"`
	Value []byte `json:"value"`
}

// Save reads the remembered templates of a namespace.
func Save(r *kernel.Root, scope string) (Saved, error) {
	o, err := r.Open(engine.TemplatesInstance(scope))
	if errors.Is(err, kernel.ErrNotExist) || errors.Is(err, kernel.ErrABI) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer o.Close()
	if o.Meta.RequireABI(o.Instance, record.ABI) != nil {
		return nil, nil // of another version: they remain unchanged
	}
	all, _, err := loadSessions(o.Maps["store"])
	if err != nil {
		return nil, err
	}
	var out Saved
	for k, v := range all {
		key, err := binary.Append(nil, binary.NativeEndian, k)
		if err != nil {
			return nil, err
		}
		out = append(out, savedSession{key, v.marshal()})
	}
	return out, nil
}

// read decodes the session. v is nil if it is not valid.
func (s savedSession) read() (k bpf.TemplatesSession, v *FlowSession) {
	v = &FlowSession{}
	if binary.Read(bytes.NewReader(s.Key), binary.NativeEndian, &k) != nil || v.unmarshal(s.Value) != nil {
		return k, nil
	}
	return k, v
}

// lost returns the sessions that are no longer remembered.
func (t Saved) lost(r *kernel.Root, scope string) (Saved, error) {
	now, err := Save(r, scope)
	if err != nil {
		return nil, err
	}
	have := map[string]bool{}
	for _, s := range now {
		have[string(s.Key)] = true
	}
	var out Saved
	for _, s := range t {
		if _, v := s.read(); v != nil && !have[string(s.Key)] {
			out = append(out, s)
		}
	}
	return out, nil
}

// Plan adds a step to restore the lost sessions.
func (t Saved) Plan(plan *feature.Plan, r *kernel.Root, scope string) error {
	lost, err := t.lost(r, scope)
	if err != nil || len(lost) == 0 {
		return err
	}
	plan.Add(feature.Step{Verb: "restore", Object: "templates of net:[" + scope + "]", Detail: printable.Count(len(lost), "exporter"),
		Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", t.Restore(l, scope) }})
	return nil
}

// Restore publishes new maps with the current and the lost sessions. A running weir serve, the only writer, switches to
// the new maps.
func (t Saved) Restore(l *kernel.WriteLock, scope string) error {
	now, err := Save(l.Root, scope)
	if err != nil {
		return err
	}
	lost, err := t.lost(l.Root, scope)
	if err != nil || len(lost) == 0 {
		return err
	}
	ns, err := l.OpenScope("", scope)
	if errors.Is(err, netns.ErrGone) {
		return nil
	} else if err != nil {
		return err
	}
	defer ns.Close()
	return publishTemplates(l, ns, append(now, lost...))
}
