// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"

	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// TemplatesName is the instance of the remembered exporters. It outlives weir serve: the templates stay known if a
// collector restarts just after weir serve does.
const TemplatesName = "@templates"

func TemplatesInstance(scope string) kernel.Instance {
	return kernel.Instance{Scope: scope, Feature: spec.Name, Name: TemplatesName}
}

// RemoveTemplates removes a namespace's exporters if no service remains there.
func RemoveTemplates(l *kernel.WriteLock, scope string) error {
	all, err := l.Instances(spec.Name)
	if err != nil {
		return err
	}
	for _, i := range all {
		if i.Scope == scope && kernel.ValidName(i.Name) {
			return nil
		}
	}
	if _, err := record.Shared.Read(l.Root, TemplatesInstance(scope)); errors.Is(err, kernel.ErrABI) {
		return nil // pinned by another version of weir
	}
	return l.Remove(TemplatesInstance(scope))
}
