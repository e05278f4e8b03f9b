// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"testing"

	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/kernel"
)

func TestNamesOfNewServices(t *testing.T) {
	w := newDispatchWorld(t)
	const evil = "\x1b[31mred"
	w.locked(func(l *kernel.WriteLock) error {
		if _, err := bindings.Bind(l, here(t), binding(t, evil+" tcp 127.9.0.0/24 80")); !errors.Is(err, engine.ErrLabel) {
			t.Errorf("bound: %v", err)
		}
		if _, err := bindings.RegisterSockets(l, here(t), []bindings.Registration{{Service: evil, FD: 0}}); !errors.Is(err, engine.ErrLabel) {
			t.Errorf("registered: %v", err)
		}
		return nil
	})
}
